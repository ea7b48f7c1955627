"""Scoring of the synthetic suite: a published example, the scores of parts, the table and the plots."""

import json
import math

import pytest
import torch
from torchvision.io import decode_image

import dclm
from dclm.synthetic_tasks import TASKS, make_suite, read_texts, write_texts

from ..commands import run
from .models import numbers, small_folder

PUBLISHED = (  # from table 11: shots, and the answer in brackets
    "\n< Ruth has a violin. Carol has a beetle. Ronald has blueberries. >. Ronald has a kind of fruit"
    "\n< Deborah has a shirt. Daniel has strawberries. Edward has a grenade. >. Deborah has a kind of [ clothing ]\n"
)


@torch.no_grad()
def test_published_example_matches_manual_score(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = small_folder(tmp_path / "model", context_length=512)
    (tmp_path / "table11.jsonl").write_text(json.dumps({"task_id": "task0", "texts": PUBLISHED}) + "\n")
    run("evaluate", "--checkpoint=model", "--suites", "table11.jsonl", "--out=out")
    found = numbers(tmp_path / "out/model.json")
    decoder, tokenizer = dclm.load_model(folder)
    whole = tokenizer.encode([PUBLISHED.replace("[ ", "").replace(" ]\n", "")])[0].tolist()
    before = tokenizer.encode([PUBLISHED[: PUBLISHED.index(" [ ")]])[0].tolist()
    assert whole[: len(before)] == before and tokenizer.decode(whole[len(before) :]) == " clothing"
    logits = decoder(torch.tensor([whole]))[0, len(before) - 1 : -1].double()
    answer = torch.tensor(whole[len(before) :])
    nats = -logits.log_softmax(-1)[range(len(answer)), answer]
    for name in ("table11.jsonl", "table11.jsonl: 1 shots", "table11.jsonl: task task0"):
        assert found[name, "perplexity"] == pytest.approx(math.exp(nats.mean()), rel=1e-5)
        assert found[name, "exact_match"] == float((logits.argmax(-1) == answer).all())
    printed = capsys.readouterr().out
    assert "table11.jsonl: 1 shots" in printed and "task task0" not in printed
    assert (tmp_path / "out/table11-shots.png").is_file() and not (tmp_path / "out/table11-tasks.png").exists()


def test_part_scores_sum_to_total_and_plots_are_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("one", "two")):
        small_folder(tmp_path / name, seed=seed, context_length=1024)
    write_texts(tmp_path / "suite.jsonl", make_suite(tasks=TASKS[::12], count=1))
    run("evaluate", "--checkpoint", "one", "two", "--suites", "suite.jsonl", "--out=out", "--batch_size=16")
    measures = json.loads((tmp_path / "out/one.json").read_text())["results"]["suite suite.jsonl"]["measures"]
    texts = read_texts(tmp_path / "suite.jsonl")
    whole = {measure["metric"]: measure for measure in measures if measure["name"] == "suite.jsonl"}
    assert whole["exact_match"]["count"] == 6 * len(texts)
    for kind in (" shots", " x ", ": task "):
        parts = [m for m in measures if kind in m["name"] and m["metric"] == "perplexity"]
        nats = sum(math.log(part["value"]) * part["count"] for part in parts)
        assert math.exp(nats / whole["perplexity"]["count"]) == pytest.approx(whole["perplexity"]["value"], rel=1e-9)
    for picture in ("suite-shots.png", "suite-tasks.png"):
        pixels = decode_image(str(tmp_path / "out" / picture))[:3].float()
        assert (pixels.flatten(1).std(1) > 10).all()

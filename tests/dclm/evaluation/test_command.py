"""`dclm evaluate`: invariance to batches and processes, resuming, tables and error messages."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from filelock import FileLock
from safetensors.torch import load_file, save_file

from dclm.evaluation import scorer
from tests.dctrain.commands import ROOT
from tests.faults.fault_injection import mistake

from ..commands import run
from .models import SOURCES, numbers, pile, small_folder, spans, write_records


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return the working directory, a folder with a model, texts and spans."""
    monkeypatch.chdir(tmp_path)
    small_folder(tmp_path / "model")
    pile(tmp_path / "pile.jsonl"), spans(tmp_path / "flan.jsonl")
    return tmp_path


ASKED = ("--checkpoint=model", "--texts", "pile.jsonl", *map(str, SOURCES[:2]), "--spans", "flan.jsonl")


def test_results_are_independent_of_batch_size_and_padding(here):
    found = []
    for size in (1, 5, 64):
        run("evaluate", *ASKED, f"--batch_size={size}", f"--out=out{size}")
        found.append(numbers(here / f"out{size}" / "model.json"))
    assert len(found[0]) == 11 and all("bits_per_byte" in key or value > 1 for key, value in found[0].items())
    for others in found[1:]:
        assert others == pytest.approx(found[0], rel=1e-6)


def together(count: int, *args: str) -> list[subprocess.Popen]:
    """Start evaluation processes with the environment variables of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": str(count)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "dclm", "evaluate", *args],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


@pytest.mark.slow
def test_two_processes_match_one_process(here):
    run("evaluate", *ASKED, "--out=one")
    said = [(process.communicate(timeout=120), process.returncode) for process in together(2, *ASKED, "--out=two")]
    assert [code for _, code in said] == [0, 0], said
    assert numbers(here / "two" / "model.json") == pytest.approx(numbers(here / "one" / "model.json"), rel=1e-6)
    (first, _), ((silent, _), _) = said[0][0], said[1]
    assert "perplexity" in first and "perplexity" not in silent
    assert sorted(path.name for path in (here / "two").iterdir()) == ["model.json", "table.csv", "table.md"]


@pytest.mark.long
def test_evaluation_resumes_after_one_process_is_killed(here):
    """Three processes start, one is killed and the others exit. Two processes then resume the evaluation."""
    asked = (*ASKED, "--batch_size=1", "--stride=4", "--out=out")
    processes = together(3, *asked)
    while len(partial(here)) < 3 or any(len(path.read_text().splitlines()) < 20 for path in partial(here)):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGKILL)
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert "error: another process of this run has died" in said[0]
    kept = sum(len(path.read_text().splitlines()) - 1 for path in partial(here))
    assert kept > 50
    again = together(2, *asked)
    said = [process.communicate(timeout=300)[1] for process in again]
    assert [process.returncode for process in again] == [0, 0], said
    run("evaluate", *ASKED, "--stride=4", "--out=whole")
    assert numbers(here / "out" / "model.json") == pytest.approx(numbers(here / "whole" / "model.json"), rel=1e-6)


def partial(folder):
    return list((folder / "out").glob("*.partial-*")) if (folder / "out").is_dir() else []


SCORE = scorer.score


class Counted:
    """Replacement for `scorer.score` that counts batches and raises KeyboardInterrupt before batch `stop_at`."""

    def __init__(self, monkeypatch, stop_at=None):
        self.count, self.stop_at = 0, stop_at
        monkeypatch.setattr(scorer, "score", self)

    def __call__(self, decoder, batch):
        if self.count == self.stop_at:
            raise KeyboardInterrupt
        self.count += 1
        return SCORE(decoder, batch)


def test_interrupted_evaluation_resumes_at_next_batch(here, monkeypatch, capsys):
    asked = ("evaluate", *ASKED, "--batch_size=1", "--out=out")
    whole = Counted(monkeypatch)
    run(*asked[:-1], "--out=whole")
    first = Counted(monkeypatch, stop_at=whole.count * 2 // 3)
    with pytest.raises(SystemExit) as exit_info:
        run(*asked)
    assert exit_info.value.code == 130
    (journal,) = partial(here)
    with open(journal, "a") as file:
        file.write('["half a li')  # simulates a process that is killed while it writes a line
    second = Counted(monkeypatch)
    run(*asked)
    assert first.count + second.count == whole.count
    assert numbers(here / "out" / "model.json") == numbers(here / "whole" / "model.json")
    assert not partial(here)
    third = Counted(monkeypatch)
    capsys.readouterr()
    run(*asked)
    assert third.count == 0 and "measured" not in capsys.readouterr().out
    run(*asked, "--stride=32")
    assert third.count > 0
    assert "pile.jsonl measured; windows of 64 tokens with stride 32" in capsys.readouterr().out


def test_results_record_provenance_and_tables_show_differences(here, capsys):
    small_folder(here / "other", seed=1, name="transformer_pp_debug")
    run("evaluate", "--checkpoint", "model", "other", "--spans", "flan.jsonl", "--out=out")
    printed = capsys.readouterr().out
    content = json.loads((here / "out" / "model.json").read_text())
    assert {"weights_crc32", "dtype", "config", "tokenizer"} == set(content["identity"])
    assert {"commit", "torch", "device"} <= set(content["environment"]) and content["checkpoint"] == "model"
    settings = content["results"]["spans flan.jsonl"]["settings"]
    assert settings["context_length"] == 64 and len(settings["sha256"]) == 64
    first, second = (numbers(here / "out" / f"{name}.json")["flan.jsonl", "target_perplexity"] for name in MODELS)
    row = next(line for line in printed.splitlines() if line.startswith("| flan.jsonl"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:] == ["target_perplexity", f"{first:.3f}", f"{second:.3f} / {second - first:+.3f}"]
    assert row in (here / "out" / "table.md").read_text()
    with open(here / "out" / "table.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["model"], float(row["value"])) for row in rows] == [("model", first), ("other", second)]
    run("evaluate", "--compare", "out/other.json", "out/model.json")
    assert f"{first:.3f} / {first - second:+.3f}" in capsys.readouterr().out


MODELS = ("model", "other")


def test_results_with_different_settings_are_not_subtracted(here, capsys):
    small_folder(here / "other", seed=1)
    run("evaluate", "--checkpoint=model", "--texts", "pile.jsonl", "--limit=2")
    run("evaluate", "--checkpoint=other", "--texts", "pile.jsonl", "--compare", "evaluation/model.json")
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("| pile.jsonl ") and "other" not in line]
    assert rows[-2:] and all(" * |" in row and " / " not in row for row in rows[-2:])
    assert "measured with different settings than the first model (limit); not subtracted" in printed


def test_files_with_equal_names_have_separate_rows_and_a_folder_has_one_row(here, capsys):
    for name in ("a", "b"):
        (here / name).mkdir()
        (here / name / "x.txt").write_text(SOURCES[0].read_text()[: 900 if name == "a" else 500])
    run("evaluate", "--checkpoint=model", "--texts", "a/x.txt", "b/x.txt")
    found = numbers(here / "evaluation" / "model.json")
    assert found["a/x.txt", "perplexity"] != found["b/x.txt", "perplexity"]
    (here / "a" / "y.txt").write_text("")
    run("evaluate", "--checkpoint=model", "--texts", "a", "--out=folder")
    assert numbers(here / "folder" / "model.json")["a", "perplexity"] == found["a/x.txt", "perplexity"]


def test_results_of_different_config_are_rejected(here, capsys):
    run("evaluate", "--checkpoint=model", "--spans", "flan.jsonl", "--out=out")
    path = here / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_base": 123.0}))
    error = mistake(capsys, run, "evaluate", "--checkpoint=model", "--spans", "flan.jsonl", "--out=out")
    assert "model.json belongs to a different model: config differ" in error


def test_concurrent_evaluation_of_same_result_is_rejected(here, capsys):
    (here / "out").mkdir()
    with FileLock(here / "out" / ".model.lock"):
        error = mistake(capsys, run, "evaluate", "--checkpoint=model", "--spans", "flan.jsonl", "--out=out")
    assert "out/model.json is being written by another evaluation" in error


def test_nan_log_likelihoods_report_error(here, capsys):
    path = here / "model" / "model.safetensors"
    weights = load_file(path)
    weights["norm.weight"] *= float("nan")
    save_file(weights, path)
    error = mistake(capsys, run, "evaluate", "--checkpoint=model", "--spans", "flan.jsonl")
    assert "the log-likelihoods are NaN" in error


def test_special_characters_in_names_are_escaped_in_tables(here, capsys):
    text = SOURCES[0].read_text()[:300]
    names = ['A "q", x|y', "two\nlines"]
    write_records(here / "t.jsonl", [{"text": text, "meta": {"pile_set_name": name}} for name in names])
    run("evaluate", "--checkpoint=model", "--texts", "t.jsonl")
    with open(here / "evaluation" / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["name"] for row in rows} == {"t.jsonl", *(f"t.jsonl: {name}" for name in names)}
    table = (here / "evaluation" / "table.md").read_text()
    assert 't.jsonl: A "q", x\\|y' in table and "t.jsonl: two lines" in table


def test_truncated_texts_are_reported(here, capsys):
    write_records(here / "long.jsonl", [{"prompt": "word " * 300, "target": "end"}, {"prompt": "a", "target": "b"}])
    run("evaluate", "--checkpoint=model", "--spans", "long.jsonl")
    assert "1 texts longer than 64 tokens were truncated on the left" in capsys.readouterr().out
    assert json.loads((here / "evaluation" / "model.json").read_text())["results"]["spans long.jsonl"]["note"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "checkpoint: expected at least one model, or results"),
        (["--checkpoint=model"], "nothing to measure; expected texts, spans, suites, masked or tasks"),
        (["--texts", "pile.jsonl"], "checkpoint=[]: expected at least one model"),
        (["--checkpoint=none", "--texts", "pile.jsonl"], "no checkpoint"),
        (["--checkpoint=model", "--texts", "none.txt"], "input none.txt does not exist"),
        (
            ["--checkpoint=model", "--texts", "pile.jsonl", "--text_key=body"],
            "pile.jsonl, line 1: no text with key 'body'",
        ),
        (["--checkpoint=model", "--texts", "pile.jsonl", "--stride=0"], "stride=0 must be at least 1"),
        (["--checkpoint=model", "--texts", "pile.jsonl", "--stride=65"], "stride=65 must be at most the context of 64"),
        (["--checkpoint=model", "--texts", "pile.jsonl", "pile.jsonl"], "pile.jsonl is given twice"),
        (["--checkpoint=model", "--texts", "pile.jsonl", "--device=gpu"], "device='gpu' is unknown"),
        (["--checkpoint=model", "--texts", "pile.jsonl", "--dtype=int8"], "dtype='int8'; expected float32, bfloat16"),
        (["--checkpoint=model", "--spans", "pile.jsonl"], "pile.jsonl, line 1: no text with key 'prompt'"),
        (["--checkpoint=model", "--spans", "flan.jsonl", "--target_key=x"], "flan.jsonl, line 1: no text with key 'x'"),
        (
            ["--checkpoint=model", "--spans", "empty.jsonl"],
            "empty.jsonl, line 2: a target of 0 tokens; expected 1 to 64",
        ),
        (["--checkpoint=model", "--spans", "model/tokenizer.json"], "is a single JSON document; expected .jsonl"),
        (["--compare", "model/config.json"], "model/config.json is not a result of `evaluate`"),
        (
            ["--checkpoint=model", "--tokenizer=big.json", "--texts", "pile.jsonl"],
            "big.json has 500 tokens and the model 400",
        ),
        (["--checkpoint", "model", "a/model", "--texts", "pile.jsonl"], "two models are named model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_arguments_report_error(here, capsys, arguments, message):
    from dclm.data.tokenizers import train_bpe

    (here / "big.json").write_text(train_bpe([SOURCES[0].read_text()], 500).spec)
    (here / "a").mkdir()
    (here / "a" / "model").symlink_to(here / "model")
    write_records(here / "empty.jsonl", [{"prompt": "a", "target": "b"}, {"prompt": "a", "target": ""}])
    assert message in mistake(capsys, run, "evaluate", *arguments)


def test_earlier_results_are_kept_if_later_input_is_invalid(here, capsys):
    write_records(here / "bad.jsonl", [{"prompt": "a"}])
    error = mistake(capsys, run, "evaluate", *ASKED, "bad.jsonl", "--out=out")
    assert "bad.jsonl, line 1: no text with key 'target'" in error
    assert len(numbers(here / "out" / "model.json")) == 11


def test_results_of_different_weights_are_rejected(here, capsys):
    run("evaluate", "--checkpoint=model", "--spans", "flan.jsonl", "--out=out")
    (here / "model").rename(here / "before")
    small_folder(here / "model", seed=1)
    error = mistake(capsys, run, "evaluate", "--checkpoint=model", "--spans", "flan.jsonl", "--out=out")
    assert "model.json belongs to a different model: weights_crc32 differ" in error


def test_command_line_arguments_override_config_file(here, capsys):
    (here / "asked.yaml").write_text("checkpoint: [model]\ntexts: [pile.jsonl]\nspans: [flan.jsonl]\nlimit: 3\n")
    run("evaluate", "--config=asked.yaml", "--spans", "flan.jsonl", "--limit=2")
    results = json.loads((here / "evaluation" / "model.json").read_text())["results"]
    assert [entry["settings"]["limit"] for entry in results.values()] == [2, 2]
    twice = mistake(capsys, run, "evaluate", "--config=asked.yaml", "--spans", "a", "--spans", "b")
    assert "--spans is given twice" in twice
    assert "none.yaml" in mistake(capsys, run, "evaluate", "--config=none.yaml")

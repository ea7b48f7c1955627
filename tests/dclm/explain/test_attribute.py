"""`dclm explain attribute`: attributions of predictions to branches, heads and tokens."""

import csv

import pytest
import torch

import dclm
from dclm.load import load_model
from tests.faults.fault_injection import mistake

from ..commands import run
from ..evaluation.models import SOURCES, write_records

PROMPT = "def isabstract(self):\n    return"


def credits(path) -> dict[str, list[tuple[str, float]]]:
    found = {}
    with open(path) as file:
        for row in csv.DictReader(file):
            found.setdefault(row["kind"], []).append((row["name"], float(row["value"])))
    return found


@torch.no_grad()
def log_probability(tokens, target: int) -> float:
    decoder = dclm.load_pretrained("model")
    return float(decoder(torch.tensor([tokens]))[0, -1].log_softmax(-1)[target])


@pytest.mark.slow
def test_token_attributions_sum_to_change_of_log_probability(here, capsys):
    run("explain", "attribute", "--checkpoint=model", f"--prompt={PROMPT}", "--steps=128", "--out=out")
    printed = capsys.readouterr().out
    tokenizer = load_model("model").tokenizer
    ids = tokenizer.encode([PROMPT])[0].tolist()
    answer = int(dclm.load_pretrained("model")(torch.tensor([ids]))[0, -1].argmax())
    found = credits(here / "out/attribution.csv")
    assert [name for name, _ in found["tokens"]] == [tokenizer.decode([token]) for token in ids]
    change = log_probability(ids, answer) - log_probability([tokenizer.eos_id] * len(ids), answer)
    assert sum(value for _, value in found["tokens"]) == pytest.approx(change, abs=0.02)
    assert len(found["branches"]) == 2 * 8 and len(found["heads"]) == 2 * 4
    assert f"log-probability of {tokenizer.decode([answer])!r} after" in printed
    assert (here / "out/attribution.png").stat().st_size > 10_000


def test_target_option_sets_predicted_token(here, capsys):
    """A space before the target is part of the target, as in the scoring of texts."""
    for prompt, target in ((PROMPT, " the"), (f"{PROMPT} ", "the")):
        run(
            "explain",
            "attribute",
            "--checkpoint=model",
            f"--prompt={prompt}",
            f"--target={target}",
            "--over=heads",
            "--steps=2",
        )
        assert "log-probability of ' the'" in capsys.readouterr().out
    assert list(credits(here / "attribution/attribution.csv")) == ["heads"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target= selfish"], "target=' selfish' is "),
        (["--target=the"], "expected one; ' the' is a single token"),
        ([f"--prompt={PROMPT} ", "--target=self.x"], "The trailing space of the prompt is part of the target."),
        (["--over=layers"], "over=['layers']; expected one or more of branches, heads, tokens"),
        (["--steps=0"], "steps=0"),
        (["--steps=1000000000"], "steps=1000000000"),
        (["--out="], "out=''"),
        (["--prompt="], "prompt='' has no tokens"),
        ([f"--prompt={PROMPT * 9}"], "tokens; expected at most 64"),
    ],
)
def test_invalid_prompt_arguments_report_error(here, capsys, arguments, message):
    prompt = [] if "prompt" in arguments[0] else [f"--prompt={PROMPT}"]
    assert message in mistake(capsys, run, "explain", "attribute", "--checkpoint=model", *prompt, *arguments)


@pytest.mark.parametrize("kind", [pytest.param("texts", marks=pytest.mark.slow), "suite"])
def test_attributions_of_many_predictions_match_ablation(here, capsys, kind):
    """The loss increase without a single head equals that of `ablate`; attributions sum to the change of all heads."""
    if kind == "suite":
        texts = [{"task_id": "one", "texts": f"a cat is a cat\n{name} is a [ {name} ]\n"} for name in ("dog", "horse")]
        data = str(write_records(here / "data.jsonl", texts))
    else:
        data = str(SOURCES[1])
    run("explain", "attribute", "--checkpoint=model", f"--{kind}={data}", "--alone=true", "--steps=32", "--out=out")
    printed = capsys.readouterr().out
    run("explain", "ablate", "--checkpoint=model", f"--{'suites' if kind == 'suite' else kind}={data}", "--off=heads")
    with open("ablation/ablation.csv") as file:
        lost = {row["without"]: float(row["worse_by"]) for row in csv.DictReader(file) if row["metric"] == "loss"}
    with open("out/attribution.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "heads"]
    with open("out/attribution-sums.csv") as file:
        branches, heads = csv.DictReader(file)
    assert len(rows) == 8
    for row in rows:
        assert float(row["alone"]) == pytest.approx(lost[f"{row['name']} of {row['layer']}"], abs=1e-6)
    change = float(heads["whole"]) - float(heads["without"])
    assert sum(float(row["value"]) for row in rows) == pytest.approx(change, abs=1e-3)
    assert -1 <= float(heads["rank_correlation"]) <= 1
    assert float(branches["whole"]) == pytest.approx(float(heads["whole"]))
    assert "mean log-probability of" in printed and "Attributions by layer: blocks.0.attn " in printed
    assert printed.count("Rank correlation of attributions") == 2


def test_attributions_are_independent_of_batch_size(here):
    credited = []
    for size in (1, 3):
        asked = ("--checkpoint=model", f"--texts={SOURCES[1]}", "--over=heads", "--steps=2", f"--batch_size={size}")
        run("explain", "attribute", *asked)
        credited.append([value for _, value in credits("attribution/attribution.csv")["heads"]])
    assert credited[0] == pytest.approx(credited[1], abs=1e-6)


def test_limit_restricts_number_of_suite_texts(here, capsys):
    write_records(here / "data.jsonl", [{"task_id": str(i), "texts": f"a is [ b ]\n{i} is [ c ]\n"} for i in range(9)])
    run("explain", "attribute", "--checkpoint=model", "--suite=data.jsonl", "--limit=2", "--over=heads", "--steps=1")
    assert f"mean log-probability of {2 * 2} tokens of data.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing given; expected one of prompt, texts, suite"),
        (["--prompt=a", "--texts=b"], "prompt and texts given; expected one of prompt, texts, suite"),
        (["--texts=b", "--target=c"], "target='c' requires a prompt"),
        (["--texts=b", "--over=tokens"], "over=['tokens']; expected one or more of branches, heads"),
        (["--texts=empty.txt"], "texts=empty.txt has no text"),
        (["--texts=none"], "none"),
        (["--suite=none"], "none cannot be read"),
        (["--suite=none", "--limit=0"], "limit=0 must be at least 1"),
    ],
)
def test_invalid_dataset_arguments_report_error(here, capsys, arguments, message):
    (here / "empty.txt").write_text("")
    assert message in mistake(capsys, run, "explain", "attribute", "--checkpoint=model", *arguments)


def test_plain_model_has_no_branches(here, capsys):
    asked = ("explain", "attribute", "--checkpoint=plain", f"--prompt={PROMPT}", "--steps=2")
    refused = mistake(capsys, run, *asked, "--over", "heads", "branches")
    assert "over=branches: Decoder has no layer that composes heads" in refused
    run(*asked)
    assert "plain attention: the model has no composition" in capsys.readouterr().out
    assert list(credits(here / "attribution/attribution.csv")) == ["heads", "tokens"]


def test_non_finite_weights_report_error(here, capsys):
    decoder = dclm.load_pretrained("model")
    decoder.blocks[1].mlp.up.weight.data[0, 0] = torch.nan
    (here / "nan").mkdir()
    dclm.save_pretrained(decoder, here / "nan")
    (here / "nan/tokenizer.json").write_text((here / "model/tokenizer.json").read_text())
    asked = ("explain", "attribute", "--checkpoint=nan", f"--prompt={PROMPT}", "--target= the", "--over=heads")
    assert "the model's output is not finite" in mistake(capsys, run, *asked)


def test_files_that_are_not_utf8_are_reported(here, capsys):
    (here / "texts").mkdir()
    (here / "texts/a.txt").write_bytes(b"\xff\xfe\xfd")
    (here / "texts/b.txt").write_text("def main():\n")
    run("explain", "attribute", "--checkpoint=model", "--texts=texts", "--over=heads", "--steps=1")
    assert "1 files that are not UTF-8" in capsys.readouterr().out

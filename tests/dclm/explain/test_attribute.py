"""`dclm explain attribute`: the credits of a prediction."""

import csv

import pytest
import torch

import dclm
from dclm.load import load_model
from tests.faults.drill import mistake

from ..commands import run

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


def test_credits_of_tokens_sum_up(here, capsys):
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


def test_a_target_of_ones_own(here, capsys):
    """A space before the target belongs to it, as when texts are scored."""
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
        (["--over=layers"], "over=['layers']; accepted: one or more of branches, heads, tokens"),
        (["--steps=0"], "steps=0 must be at least 1"),
        (["--prompt="], "prompt='' holds no token"),
        ([f"--prompt={PROMPT * 9}"], "tokens; accepted: at most 64"),
    ],
)
def test_mistakes(here, capsys, arguments, message):
    prompt = [] if "prompt" in arguments[0] else [f"--prompt={PROMPT}"]
    assert message in mistake(capsys, run, "explain", "attribute", "--checkpoint=model", *prompt, *arguments)


def test_a_plain_model_has_no_branches(here, capsys):
    asked = ("explain", "attribute", "--checkpoint=plain", f"--prompt={PROMPT}", "--steps=2")
    assert "over=branches: Decoder composes no heads" in mistake(capsys, run, *asked)
    run(*asked, "--over", "heads", "tokens")

"""`dclm explain mixing`: the statistics equal those of the compositions over the same tokens."""

import csv

import pytest
import torch

from dclm.load import load_model
from dcmha.analysis import MixingMeter
from tests.faults.fault_injection import mistake

from ..commands import run
from ..evaluation.models import SOURCES


def test_statistics_match_mixing_meter(here, capsys):
    run("explain", "mixing", "--checkpoint=model", f"--texts={SOURCES[0]}", "--tokens=200", "--out=out")
    with open("out/mixing.csv") as file:
        found = {(row["layer"], row["composition"], row["what"]): row for row in csv.DictReader(file)}
    model = load_model("model")
    ids = model.tokenizer.encode([SOURCES[0].read_text()])[0][: 3 * 64]
    rows = torch.tensor(ids.astype("int64")).view(3, 1, 64)
    block, meter = model.decoder.blocks[0], MixingMeter(4, 1)
    with torch.no_grad():
        for row in rows:
            meter.add(block.attn.compose(block.attn_norm(model.decoder.embed(row)))[1])
    expected = meter.mixing()
    for branch, size in expected.sizes.items():
        row = found["blocks.0.attn", "post", f"size of {branch}"]
        assert (float(row["mean"]), float(row["std"])) == pytest.approx(size, rel=1e-5)
    assert float(found["blocks.0.attn", "post", "effective rank"]["mean"]) == pytest.approx(
        expected.effective_rank.mean
    )
    assert float(found["blocks.0.attn", "post", "share of key"]["mean"]) == pytest.approx(
        expected.shares["key"], rel=1e-4
    )
    assert len(found) == 2 * 2 * (4 + 1 + 3)
    printed = capsys.readouterr().out
    assert "compositions over 192 tokens of abc.py" in printed and printed.count("blocks.1.attn") == 2
    assert (here / "out/mixing.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens=0"], "tokens=0 must be at least 1"),
        (["--texts=nowhere"], "nowhere"),
        (["--context_length=100000", "--tokens=100000"], "too few for a row of context_length=100000"),
        (["--checkpoint=plain"], "plain: Decoder has no layer that composes heads"),
    ],
)
def test_invalid_arguments_report_error(here, capsys, arguments, message):
    given = {"--checkpoint": "model", "--texts": str(SOURCES[0])} | dict(a.split("=") for a in arguments)
    assert message in mistake(capsys, run, "explain", "mixing", *(f"{name}={value}" for name, value in given.items()))

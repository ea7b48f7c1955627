"""`dclm explain breakdown`: terms of a query-key pair, either as specified or with the largest change."""

import csv

import pytest
import torch

from dclm.load import load_model
from dcmha import record_attention
from tests.faults.fault_injection import mistake

from ..commands import run

PROMPT = "def isabstract(self): return"


@pytest.fixture
def recorded(here):
    model = load_model("model")
    ids = torch.from_numpy(model.tokenizer.encode([PROMPT])[0].astype("int64"))[None]
    with torch.no_grad(), record_attention(model.decoder) as recorded:
        model.decoder(ids)
    return recorded


def terms(path) -> dict[str, list[float]]:
    found = {}
    with open(path) as file:
        for row in csv.DictReader(file):
            found.setdefault(row["term"], []).append(float(row["value"]))
    return found


@pytest.mark.parametrize("composition", ["pre", "post"])
def test_terms_sum_to_composed_value(here, recorded, capsys, composition):
    asked = ["--layer=1", "--query=5", "--key=2", f"--composition={composition}"]
    run("explain", "breakdown", "--checkpoint=model", f"--prompt={PROMPT}", *asked, "--out=out")
    found, maps = terms("out/breakdown.csv"), recorded["blocks.1.attn"].maps
    before, after = {"pre": maps[:2], "post": maps[2:]}[composition]
    assert found["before"] == pytest.approx(before[0, :, 5, 2].tolist(), rel=1e-5)
    assert found["after"] == pytest.approx(after[0, :, 5, 2].tolist(), rel=1e-5, abs=1e-6)
    assert list(found) == ["before", "query projection", "query gate", "key projection", "key gate", "after"]
    for head in range(4):
        parts = [values[head] for name, values in found.items() if name != "after"]
        assert sum(parts) == pytest.approx(found["after"][head], abs=1e-5)
    printed = capsys.readouterr().out
    assert f"blocks.1.attn, {composition}-composition, from " in printed and "key projection (o_kp)" in printed
    assert (here / "out/breakdown.png").stat().st_size > 20_000


def test_default_layer_and_key_have_largest_change(here, recorded, capsys):
    run("explain", "breakdown", "--checkpoint=model", f"--prompt={PROMPT}")
    changes = {n: (o.maps.composed_weights - o.maps.weights)[0, :, -1].abs().amax(0) for n, o in recorded.items()}
    layer = max(changes, key=lambda name: float(changes[name].max()))
    key = int(changes[layer].argmax())
    printed = capsys.readouterr().out
    assert printed.startswith(f"{layer}, post-composition") and f" ({key})\n" in printed
    found = terms("breakdown/breakdown.csv")
    assert found["after"] == pytest.approx(recorded[layer].maps.composed_weights[0, :, -1, key].tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--query=99"], "query=99; expected -"),
        (["--key=99"], "key=99; expected -"),
        (["--layer=2"], "layer=2; expected 0 to 1, or one of blocks.0.attn, blocks.1.attn"),
        (["--query=2", "--key=5", "--composition=pre"], "key=5 is hidden from query=2 by a mask"),
        (["--composition=both"], "composition"),
        (["--checkpoint=plain"], "plain: Decoder has no layer that composes heads"),
    ],
)
def test_invalid_arguments_report_error(here, capsys, arguments, message):
    given = {"--checkpoint": "model", "--prompt": PROMPT} | dict(a.split("=") for a in arguments)
    assert message in mistake(
        capsys, run, "explain", "breakdown", *(f"{name}={value}" for name, value in given.items())
    )

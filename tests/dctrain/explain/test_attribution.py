"""Integrated gradients: credits sum to the total change of the objective and are exact for linear models."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from dcmha import DCAttention
from dcmha.analysis import composition_branches, scale_branches, scale_heads
from dctrain.errors import UserError
from dctrain.explain.attribution import Attribution, AttributionSettings, PartSet, branch_parts
from dctrain.explain.attribution_report import explain_attribution

X = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(DCAttention(32, 4, static_base=True), nn.GELU(), DCAttention(32, 4)).double().eval()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.compose.project.mul_(30)
            layer.compose.gate.mul_(5)
    return model.requires_grad_(False)


def credited(model, kind: str, *objectives, steps: int = 2, alone: bool = False) -> Attribution:
    (found,) = AttributionSettings([kind], steps, alone).attribute(model, objectives, {})
    return found


@pytest.mark.parametrize("kind", ["branches", "heads"])
def test_credits_sum_to_change_of_objective(model, kind):
    def objective():
        return model(X)[0, -1].log_softmax(-1)[3]

    found = credited(model, kind, objective, steps=64)
    assert found.whole == pytest.approx(float(objective()))
    assert abs(found.gap) < 1e-5 * max(1.0, abs(found.whole - found.without))
    few = credited(model, kind, objective, steps=1)
    assert abs(few.gap) > abs(found.gap)
    off = {
        "branches": lambda: scale_branches(model, dict.fromkeys(composition_branches(model), 0.0)),
        "heads": lambda: scale_heads(model, {name: torch.zeros(4) for name in "02"}),
    }[kind]
    with off():
        assert found.without == pytest.approx(float(objective()))


def test_head_credits_of_one_layer_equal_ablation():
    layer = DCAttention(32, 4).double().eval().requires_grad_(False)
    found = credited(layer, "heads", lambda: layer(X).sum(), alone=True)
    assert found.parts.layers == ("",) * 4 and found.parts.names == ("head 0", "head 1", "head 2", "head 3")
    whole = float(layer(X).sum())
    for head in range(4):
        factors = torch.ones(4)
        factors[head] = 0.0
        with scale_heads(layer, {"": factors}):
            lost = whole - float(layer(X).sum())
        assert float(found.values[head]) == pytest.approx(lost, rel=1e-5)
        assert float(found.alone[head]) == pytest.approx(lost, rel=1e-5)
    assert found.rank_correlation == pytest.approx(1.0)


def test_branches_are_named_by_layer_and_composition(model):
    found = branch_parts(model)
    assert list(zip(found.layers, found.names, strict=True))[:2] == [("0", "pre base"), ("0", "pre query projection")]
    assert len(found.names) == 10 + 8
    with pytest.raises(UserError, match="over=branches: Linear has no layer that composes heads"):
        credited(nn.Linear(2, 2), "branches", lambda: torch.zeros(()))


def test_credits_of_batches_are_summed(model):
    """The credits of two batches equal the sum of the credits of each batch."""
    objectives = [lambda: model(X).sum(), lambda: model(2 * X)[0, 3].log_softmax(-1)[1]]
    both = credited(model, "branches", *objectives, steps=3, alone=True)
    each = [credited(model, "branches", one, steps=3, alone=True) for one in objectives]
    torch.testing.assert_close(both.values, each[0].values + each[1].values)
    torch.testing.assert_close(both.alone, each[0].alone + each[1].alone)
    assert both.whole == pytest.approx(each[0].whole + each[1].whole)
    assert both.without == pytest.approx(each[0].without + each[1].without)


@pytest.mark.parametrize(
    ("credits", "alone", "expected"),
    [
        ([3.0, 2.0, 1.0], [9.0, 5.0, 4.0], 1.0),
        ([3.0, 2.0, 1.0], [4.0, 5.0, 9.0], -1.0),
        ([3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 0.0, 1.0], 0.8),  # 1 - 6 (0 + 0 + 1 + 1) / (4 * 15)
        ([3.0, 2.0, 1.0], [4.0, 4.0, 4.0], None),
        ([3.0, 2.0, 1.0], None, None),
    ],
)
def test_rank_correlation_matches_expected_value(credits, alone, expected):
    parts = PartSet("heads", ("0",) * len(credits), tuple(f"head {h}" for h in range(len(credits))), nullcontext)
    values = torch.tensor(credits, dtype=torch.float64)
    found = Attribution(parts, values, 1.0, 0.0, None if alone is None else torch.tensor(alone, dtype=torch.float64))
    assert found.rank_correlation == (expected if expected is None else pytest.approx(expected, abs=1e-5))
    told = explain_attribution([found], "a number")
    assert ("Rank correlation" in told.text) == (expected is not None)
    assert ("decrease if disabled" in told.text) == (alone is not None)
    assert [row.alone for row in told.tables["attribution"]] == ([None] * len(credits) if alone is None else alone)

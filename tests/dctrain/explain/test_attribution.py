"""Integrated gradients: credits sum up to what they change together, and are exact where the model is linear."""

import pytest
import torch
from torch import nn

from dcmha import DCAttention
from dcmha.analysis import composition_branches, scale_branches, scale_heads
from dctrain.explain.attribution import attribute_branches, attribute_heads

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


@pytest.mark.parametrize("attribute", [attribute_branches, attribute_heads])
def test_credits_sum_up(model, attribute):
    def objective():
        return model(X)[0, -1].log_softmax(-1)[3]

    found = attribute(model, objective, 64)
    assert found.whole == pytest.approx(float(objective()))
    assert abs(found.gap) < 1e-5 * max(1.0, abs(found.whole - found.without))
    few = attribute(model, objective, 1)
    assert abs(few.gap) > abs(found.gap)
    off = {
        "branches": lambda: scale_branches(model, dict.fromkeys(composition_branches(model), 0.0)),
        "heads": lambda: scale_heads(model, {name: torch.zeros(4) for name in "02"}),
    }[found.kind]
    with off():
        assert found.without == pytest.approx(float(objective()))


def test_heads_of_one_layer_are_credited_with_what_they_write():
    layer = DCAttention(32, 4).double().eval().requires_grad_(False)
    found = attribute_heads(layer, lambda: layer(X).sum(), 2)
    assert found.layers == ("",) * 4 and found.names == ("head 0", "head 1", "head 2", "head 3")
    whole = float(layer(X).sum())
    for head in range(4):
        factors = torch.ones(4)
        factors[head] = 0.0
        with scale_heads(layer, {"": factors}):
            assert float(found.values[head]) == pytest.approx(whole - float(layer(X).sum()), rel=1e-5)


def test_branches_are_named_by_layer_and_composition(model):
    found = attribute_branches(model, lambda: model(X).sum(), 2)
    assert list(zip(found.layers, found.names, strict=True))[:2] == [("0", "pre base"), ("0", "pre query projection")]
    assert len(found.values) == 10 + 8
    with pytest.raises(ValueError, match="Linear composes no heads"):
        attribute_branches(nn.Linear(2, 2), lambda: torch.zeros(()), 2)

"""Scaling of branches and heads: a factor of zero equals a model without the part; factors receive gradients."""

import pytest
import timm
import torch

from dcmha import DCAttention, DCCrossAttention
from dcmha.analysis import Branch, composition_branches, scale_branches, scale_heads
from dcmha.impl.reference import BRANCHES


def composed(**options) -> DCAttention:
    torch.manual_seed(0)
    layer = DCAttention(32, 4, **options).double()
    with torch.no_grad():
        layer.compose.project.mul_(100)
    return layer


X = torch.randn(2, 7, 32, dtype=torch.float64)
WITHOUT = {
    "base": {"static_base": False},
    "query": {"query_wise": False, "static_base": True},
    "gate": {"dynamic_gate": False, "static_base": True},
    "pre": {"pre_compose": False, "static_base": True},
}


@pytest.mark.parametrize("part", WITHOUT)
def test_branches_scaled_by_zero_equal_a_layer_without_them(part):
    layer = composed(static_base=True)
    without = DCAttention(32, 4, **WITHOUT[part]).double()
    state = layer.state_dict()
    roles = {"query": slice(2, 4), "pre": slice(1, None, 2), "gate": slice(0, 4), "base": slice(0, 4)}[part]
    for name, rows in (("hidden", 16), ("project", 1), ("gate", 4)):
        weight = state[f"compose.{name}"].unflatten(0, (4, rows))
        state[f"compose.{name}"] = weight[roles].flatten(0, 1)
    state["compose.base"] = state["compose.base"][1:] if part == "pre" else state["compose.base"]
    state = {name: value for name, value in state.items() if name in without.state_dict()}
    without.load_state_dict(state)
    off = [b for b in composition_branches(layer) if part in (b.composition, *b.branch.split())]
    with scale_branches(layer, dict.fromkeys(off, 0.0)):
        found = layer(X, is_causal=True)
    torch.testing.assert_close(found, without(X, is_causal=True))
    assert not torch.allclose(found, layer(X, is_causal=True))


def test_composition_branches_lists_only_existing_branches():
    model = torch.nn.Sequential(
        composed(static_base=True), DCAttention(32, 4, pre_compose=False, key_wise=False, rank=0)
    )
    listed = composition_branches(model)
    assert listed[:5] == [Branch("0", "pre", branch) for branch in BRANCHES]
    assert listed[10:] == [Branch("1", "post", "query gate")]
    plain = DCAttention(32, 4, pre_compose=False, post_compose=False)
    with pytest.raises(ValueError, match="DCAttention has no layer that composes heads"):
        composition_branches(plain)


def test_factors_of_one_preserve_the_output_and_receive_gradients():
    layer = composed()
    factors = {branch: torch.ones((), requires_grad=True) for branch in composition_branches(layer)}
    heads = torch.ones(4, requires_grad=True)
    expected = layer(X)
    with scale_branches(layer, factors), scale_heads(layer, {"": heads}):
        found = layer(X)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    assert all(factor.grad.abs() > 0 for factor in factors.values()) and (heads.grad.abs() > 0).all()
    torch.testing.assert_close(layer(X), expected)


@pytest.mark.parametrize("make", [composed, lambda: timm.layers.Attention(32, 4).double()])
def test_head_scaled_by_zero_does_not_contribute_to_the_output(make):
    layer = make()
    with scale_heads(layer, {"": torch.tensor([1.0, 0.0, 1.0, 1.0])}):
        found = layer(X)
    with torch.no_grad():
        layer.proj.weight[:, 8:16] = 0
    torch.testing.assert_close(found, layer(X))


def test_scaled_branch_of_cross_attention_equals_zeroed_weights():
    layer = DCCrossAttention(32, 4)
    x, context = X.float(), X.float()
    with scale_branches(layer, {Branch("", "post", "key gate"): 0.0}):
        found = layer(x, context)
    with torch.no_grad():
        layer.compose.key.gate[4:] = 0
    torch.testing.assert_close(found, layer(x, context))


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (
            lambda m: scale_branches(m, {Branch("0", "pre", "base"): 0.0}),
            r"\('0', 'pre', 'base'\) is not a branch of the mod",
        ),
        (lambda m: scale_branches(m, {Branch("1", "pre", "key gate"): 0.0}), "is not a branch of the model"),
        (lambda m: scale_heads(m, {"1": torch.ones(4)}), "layer '1' is not in the model; expected 0"),
        (lambda m: scale_heads(m, {"0": torch.ones(5)}), r"factors of '0' have shape \[5\]; expected a tensor \[4\]"),
    ],
)
def test_unknown_branches_or_layers_and_wrong_shapes_raise_error(context, message):
    with pytest.raises(ValueError, match=message), context(torch.nn.Sequential(composed())):
        pass

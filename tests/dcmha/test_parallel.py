"""split_heads: outputs and gradients of the shares of all ranks sum to those of the layer."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dcmha import DCAttention, ShardedDim, split_heads

from .inputs import relative_error

LAYERS = {
    "plain": {"pre_compose": False, "post_compose": False},
    "groups": {"num_groups": 4, "window_size": 3},
    "shared keys": {"num_groups": 4, "num_kv_heads": 4},
    "all": {"num_groups": 4, "static_base": True, "qk_norm": True, "norm_layer": nn.LayerNorm, "gated": True},
    "query alone": {"num_groups": 8, "key_wise": False, "post_compose": False, "rank": 1},
}


def share(whole: Tensor, split: ShardedDim, rank: int, ranks: int) -> Tensor:
    """Return the share of a parameter for one rank, as documented in `ShardedDim`."""
    if split.dim is None:
        return whole
    unit = whole.shape[split.dim] // sum(split.parts)
    parts = whole.split([unit * part for part in split.parts], split.dim)
    return torch.cat([part.chunk(ranks, split.dim)[rank] for part in parts], split.dim)


def share_of(layer: DCAttention, rank: int, ranks: int) -> tuple[DCAttention, dict[str, ShardedDim]]:
    part = copy.deepcopy(layer)
    splits = split_heads(part, ranks)
    for name, whole in layer.named_parameters():
        owner, _, key = name.rpartition(".")
        own = share(whole.detach(), splits.get(name, ShardedDim()), rank, ranks)
        part.get_submodule(owner)._parameters[key] = nn.Parameter(own.clone())
    if rank:
        part.proj.bias = None  # only rank 0 adds the bias
    return part, splits


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", LAYERS)
def test_shares_of_all_ranks_sum_to_the_layer(kind, ranks):
    torch.manual_seed(0)
    layer = DCAttention(48, 8, attn_head_dim=5, qkv_bias=True, **LAYERS[kind]).double()
    x = torch.randn(2, 7, 48, dtype=torch.float64, requires_grad=True)
    expected = layer(x, is_causal=True)
    d_out = torch.randn_like(expected)
    expected.backward(d_out)
    d_x, x.grad = x.grad, None
    parts = [share_of(layer, rank, ranks) for rank in range(ranks)]
    out = sum(part(x, is_causal=True) for part, _ in parts)
    assert relative_error(out, expected) < 1e-12
    out.backward(d_out)
    assert relative_error(x.grad, d_x) < 1e-12
    for name, whole in layer.named_parameters():
        for rank, (part, splits) in enumerate(parts):
            split = splits.get(name, ShardedDim())
            if split.is_summed:
                got, wanted = sum(dict(p.named_parameters())[name].grad for p, _ in parts), whole.grad
            elif name == "proj.bias" and rank > 0:
                assert part.proj.bias is None
                continue
            else:
                got, wanted = dict(part.named_parameters())[name].grad, share(whole.grad, split, rank, ranks)
            assert relative_error(got, wanted) < 1e-12, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "num_groups=1 cannot be split over 2 ranks: it must be a multiple of them"),
        ({"num_groups": 3}, "num_groups=3 cannot be split"),
        ({"num_groups": 2, "num_kv_heads": 3}, "num_kv_heads=3 cannot be split over 2 ranks: it must be a multiple"),
        (LAYERS["plain"] | {"scale_norm": True, "norm_layer": nn.LayerNorm}, "scale_norm=True: a norm over all heads"),
    ],
)
def test_layers_that_cannot_be_split_raise_error(options, message):
    with pytest.raises(ValueError, match=message):
        split_heads(DCAttention(48, 6, **options), 2)

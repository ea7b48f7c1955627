"""complexity.py: table 2 of the paper and exact counts against the FLOP counter of torch."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dcmha import DCAttention, approximate_overhead, attention_flops, compose_cost, visible_pairs
from dcmha.impl.masking import visible_keys


def test_approximate_overhead_reproduces_table_2():
    rows = [(64, 1.0, 2.6, 4.8), (128, 0.5, 1.3, 1.9), (128, 2.0, 1.3, 3.3)]
    for head_dim, rho, params, flops in rows:
        got = approximate_overhead(head_dim, 2, rho)
        assert [round(100 * value, 1) for value in got] == [params, flops]


OPTIONS = [
    {},
    {"rank": 1, "num_groups": 2},
    {"key_wise": False},
    {"static_base": True, "post_compose": False},
    {"rank": 0},
    {"query_wise": False, "key_wise": False, "static_base": True},
]


def flops_of(function, *arguments) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*arguments)
    return counter.get_total_flops()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("C", "H", "T"), [(48, 6, 17), (64, 4, 40)])
def test_flop_counts_equal_torch_flop_counter(C, H, T, options):
    x = torch.empty(1, T, C, device="meta")  # on this device, all torch versions also count SDPA
    plain_options = {"pre_compose": False, "post_compose": False}
    layer, plain = (DCAttention(C, H, impl="reference", device="meta", **o) for o in (options, plain_options))
    projections = 2 * T * 4 * C * C
    assert flops_of(plain, x) == projections + attention_flops(C // H, H, T * T, **plain_options)
    assert flops_of(layer, x) - flops_of(plain, x) == compose_cost(C, H, T, T, **options).flops
    weights = flops_of(layer.compose, x)
    assert flops_of(layer, x) == projections + weights + attention_flops(C // H, H, T * T, **options)


@pytest.mark.parametrize(("T", "S"), [(7, 7), (1, 9), (5, 9), (9, 5)])
@pytest.mark.parametrize("kind", [(False, None), (True, None), (True, 3), (False, 3), (True, 100), (False, 100)])
def test_visible_pairs_equals_number_of_visible_mask_cells(T, S, kind):
    is_causal, window_size = kind
    mask = visible_keys(
        T, S, is_causal=is_causal, window_size=window_size, device=torch.device("cpu"), query_offset=S - T
    )
    expected = T * S if mask is None else int(mask.sum())
    assert visible_pairs(T, S, is_causal=is_causal, window_size=window_size) == expected


def test_parameter_counts_equal_published_totals():
    assert 12 * compose_cost(384, 6, 1, 1).params == 580_608  # DCViT-S/16
    qk_norm = 24 * 2 * 64
    assert 24 * compose_cost(2048, 32, 1, 1).params + qk_norm == 33_033_216  # DCFormer++ 1.4B

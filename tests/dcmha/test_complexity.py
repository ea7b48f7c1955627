"""complexity.py: table 2 of the paper, and exact counts against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dcmha import DCAttention, approximate_overhead, compose_cost


def test_reproduces_table_2():
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


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("C", "H", "T"), [(48, 6, 17), (64, 4, 40)])
def test_counts_equal_torchs_counter(C, H, T, options):
    x = torch.empty(1, T, C, device="meta")  # where every torch version counts its own attention too
    flops = []
    for layer_options in (options, {"pre_compose": False, "post_compose": False}):
        layer = DCAttention(C, H, impl="reference", device="meta", **layer_options)
        with FlopCounterMode(display=False) as counter:
            layer(x)
        flops.append(counter.get_total_flops())
    attention_matrix_flops = 4 * T * T * C
    assert flops[1] == 2 * T * 4 * C * C + attention_matrix_flops
    assert flops[0] - flops[1] == compose_cost(C, H, T, T, **options).flops


def test_published_dynamic_parameter_totals():
    assert 12 * compose_cost(384, 6, 1, 1).params == 580_608  # DCViT-S/16
    qk_norm = 24 * 2 * 64
    assert 24 * compose_cost(2048, 32, 1, 1).params + qk_norm == 33_033_216  # DCFormer++ 1.4B

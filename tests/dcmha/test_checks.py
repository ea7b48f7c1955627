"""Invalid arguments of the public functions raise a ValueError that names the argument."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from dcmha import (
    ComposeProjection,
    DCAttention,
    DCCrossAttention,
    DecodingCache,
    composed_attention,
    resolve_impl,
    rotary_embedding,
)
from dcmha.checks import plain_number
from dcmha.complexity import approximate_overhead, attention_flops, compose_cost, visible_pairs
from dcmha.impl.masking import DocumentBounds, document_bounds, visible_keys

Q = torch.ones(1, 4, 3, 8)
LAYER = [
    ({"dim": "32"}, "dim"),
    ({"dim": 32.0}, "dim"),
    ({"dim": True}, "dim"),
    ({"num_heads": "4"}, "num_heads"),
    ({"num_heads": 4.0}, "num_heads"),
    ({"num_heads": 0}, "num_heads"),
    ({"attn_head_dim": 8.0}, "attn_head_dim"),
    ({"dim_out": 1.5}, "dim_out"),
    ({"attn_drop": math.nan}, "attn_drop"),
    ({"attn_drop": 1.0}, "attn_drop"),
    ({"proj_drop": -0.1}, "proj_drop"),
    ({"proj_drop": "x"}, "proj_drop"),
    ({"qkv_bias": "x"}, "qkv_bias"),
    ({"norm_layer": "LayerNorm"}, "norm_layer"),
    ({"dtype": "float32"}, "dtype"),
    ({"dtype": torch.complex64}, "dtype"),
    ({"device": "nope"}, "device"),
]


@pytest.mark.parametrize("layer", [DCAttention, DCCrossAttention])
@pytest.mark.parametrize(("options", "named"), LAYER, ids=str)
def test_invalid_layer_argument_raises_error_with_its_name(layer, options, named):
    with pytest.raises(ValueError, match=f"{named}="):
        layer(**{"dim": 32, "num_heads": 4} | options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"window_size": 10**30}, "window_size"),
        ({"scale": 10**400}, "scale"),
        ({"scale": math.nan}, "scale"),
        ({"scale": -math.inf}, "scale"),
        ({"scale": True}, "scale"),
        ({"document_ids": torch.zeros(1, 3, dtype=torch.bool)}, "document_ids"),
        ({"document_ids": torch.zeros(1, 3, dtype=torch.complex64)}, "document_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_invalid_operator_argument_raises_error_with_its_name(options, named):
    with pytest.raises(ValueError, match=named):
        composed_attention(Q, Q, Q, **options)


@pytest.mark.parametrize("sizes", [(0, 4), (-1, 4), (32, 0), (32, -4), ("32", 4), (32.0, 4), (32, None), (True, 4)])
def test_invalid_projection_size_raises_error_with_its_name(sizes):
    with pytest.raises(ValueError, match="dim=|num_heads="):
        ComposeProjection(*sizes)


@pytest.mark.parametrize("x", [torch.ones(5, 32), torch.ones(1, 5, 16), torch.ones(1, 5, 32, dtype=torch.int64)])
def test_invalid_projection_input_raises_error(x):
    with pytest.raises(ValueError, match=r"x is .*\[B, T, C\]"):
        ComposeProjection(32, 4)(x)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"q": "q"}, "q is"),
        ({"q": Q[0]}, "q is"),
        ({"num_groups": 0}, "num_groups"),
        ({"num_groups": "x"}, "num_groups"),
        ({"dropout_p": math.nan}, "dropout_p"),
        ({"dropout_p": "x"}, "dropout_p"),
        ({"is_composed": "yes"}, "is_composed"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_invalid_resolve_impl_argument_raises_error_with_its_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        resolve_impl(**{"impl": "auto", "q": Q, "is_composed": True} | arguments)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *(({"base": base}, "base") for base in (0, -1, math.nan, math.inf)),
        *(({"rotary_dim": dim}, "rotary_dim") for dim in (4.0, 3, 0, "4")),
        ({"dtype": torch.int64}, "dtype"),
    ],
    ids=str,
)
def test_invalid_rotary_embedding_argument_raises_error_with_its_name(options, named):
    with pytest.raises(ValueError, match=f"{named}="):
        rotary_embedding(**{"positions": torch.arange(3), "rotary_dim": 4} | options)


def test_rotary_embedding_rejects_mismatched_shapes():
    for rope in (rotary_embedding(torch.arange(5), 4), rotary_embedding(torch.arange(3), 16)):
        with pytest.raises(ValueError, match="x has shape"):
            rope(Q, Q)


@pytest.mark.parametrize(
    "call",
    [
        lambda: visible_pairs(-1, 3),
        lambda: visible_pairs("3", 3),
        lambda: visible_pairs(3, 3, window_size=0),
        lambda: visible_pairs(3, 3, window_size=1.5),
        lambda: compose_cost(-32, 4, 3, 3),
        lambda: attention_flops(8, 4, "x"),
        lambda: approximate_overhead(0, 2, 1),
        lambda: approximate_overhead(64, -1, 1),
        lambda: approximate_overhead(64, 2, -12),
        lambda: approximate_overhead(64, 2, math.nan),
        lambda: DecodingCache([0], 5),
        lambda: DecodingCache([1.5], 5),
        lambda: DecodingCache([None], 1.5),
        lambda: DecodingCache([None], 5, padding="x"),
        lambda: DecodingCache([None], 5, padding=torch.tensor([-1])),
        lambda: DecodingCache([None], 5, padding=torch.tensor([99])),
        lambda: DecodingCache([None], 5, padding=torch.tensor(1)),
        lambda: DecodingCache([None], 5, contexts=[]),
        lambda: DecodingCache([None], 5).advance(1, 0, torch.device("cpu")),
        lambda: DecodingCache([None], 5).advance(1, 1.5, torch.device("cpu")),
        lambda: DecodingCache([None], 5).advance(-1, 1, torch.device("cpu")),
    ],
)
def test_invalid_counts_raise_error(call):
    with pytest.raises(ValueError, match="must be|expected"):
        call()


@pytest.mark.parametrize("T", [0, 1, 5, 9])
@pytest.mark.parametrize("S", [1, 5, 8])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window_size", [None, 1, 3, 20])
def test_visible_pairs_equals_number_of_visible_mask_cells(T, S, is_causal, window_size):
    mask = visible_keys(T, S, is_causal=is_causal, window_size=window_size, device="cpu", query_offset=S - T)
    expected = T * S if mask is None else int(mask.sum())
    assert visible_pairs(T, S, is_causal=is_causal, window_size=window_size) == expected


def test_visible_pairs_of_huge_sequences_are_computed_without_a_mask():
    assert visible_pairs(10**12, 10**12, is_causal=True) == 10**12 * (10**12 + 1) // 2


def test_context_precomputed_by_incompatible_layer_raises_error():
    context, x = torch.randn(1, 5, 32), torch.randn(1, 3, 32)
    layer = DCCrossAttention(32, 4)
    layer(x, layer.precompute_kv(context))
    plain = {"pre_compose": False, "post_compose": False}
    for options in ({"rank": 1}, plain, {"num_heads": 8}, {"key_wise": False}, {"pre_compose": False}):
        with pytest.raises(ValueError, match="another layer"):
            layer(x, DCCrossAttention(**{"dim": 32, "num_heads": 4} | options).precompute_kv(context))
    for options in (plain, {"key_wise": False}):
        other = DCCrossAttention(32, 4, **options)
        other(x, other.precompute_kv(context))
        with pytest.raises(ValueError, match="another layer"):
            other(x, layer.precompute_kv(context))


def test_plain_number_converts_numbers_of_other_libraries():
    given = (np.int64(3), np.float32(0.5), np.float64(0.5), Fraction(1, 2), True, 7, 0.25, None)
    got = [plain_number(x) for x in given]
    assert got == [3, 0.5, 0.5, 0.5, 1, 7, 0.25, None]
    assert [type(x) for x in got] == [int, float, float, float, int, int, float, type(None)]


def test_document_bounds_are_validated_and_made_contiguous():
    starts, stops = document_bounds(torch.tensor([[1, 1, 2], [4, 4, 4]]))
    loose = DocumentBounds(starts.long().t().contiguous().t(), torch.stack([stops, stops], 2).long()[..., 0])
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in document_bounds(loose))
    q, bad = torch.randn(2, 2, 3, 4), DocumentBounds(starts, stops[:1])
    expected = composed_attention(q, q, q, document_ids=DocumentBounds(starts, stops), impl="compiled")
    torch.testing.assert_close(composed_attention(q, q, q, document_ids=loose, impl="compiled"), expected)
    with pytest.raises(ValueError, match=r"document_ids.stops is torch.int32 \[1, 3\]"):
        composed_attention(q, q, q, document_ids=bad)
    with pytest.raises(TypeError, match="document_ids.stops is NoneType; expected a tensor"):
        composed_attention(q, q, q, document_ids=DocumentBounds(starts, None))

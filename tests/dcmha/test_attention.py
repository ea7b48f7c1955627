"""DCAttention: golden intermediates of the authors' code, options, rope, cache and autocast."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dcmha import ComposeWeights, DCAttention, SideWeights
from dcmha.cache import CacheView
from dcmha.impl import masking
from dcmha.impl.reference import compose

from .inputs import relative_error

GOLDEN = Path(__file__).parent
PLAIN = DCAttention.with_options(pre_compose=False, post_compose=False)


def rotate_half_rope(q, k):
    """Apply rotary embedding to pairs (j, j + D/2) with base 10000."""
    T, D = q.shape[-2:]
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

    def rotate(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return rotate(q), rotate(k)


class HeadRMSNorm(nn.RMSNorm):
    def __init__(self, dim, **dd):
        super().__init__(dim, eps=1e-6, **dd)


def golden_layer(index: int, impl: str) -> tuple[DCAttention, dict[str, torch.Tensor]]:
    g = load_file(GOLDEN / f"golden_layer{index}.safetensors")
    layer = DCAttention(
        64,
        4,
        qk_norm=True,
        proj_bias=False,
        norm_layer=HeadRMSNorm,
        window_size=8 if index == 0 else None,
        impl=impl,
    )
    order = [0, 2, 1, 3]  # published order: pre query, pre key, post query, post key; this package: side-major
    layer.load_state_dict(
        {
            "qkv.weight": g["wqkv"],
            "proj.weight": g["wo"],
            "q_norm.weight": g["q_norm"],
            "k_norm.weight": g["k_norm"],
            "compose.hidden": g["dw1"][:, 0, order].permute(1, 2, 0).flatten(0, 1),
            "compose.project": g["qkw"][0, order].flatten(2),
            "compose.gate": g["dd"][:, 0].view(64, 4, 4)[:, order].permute(1, 2, 0).flatten(0, 1),
        }
    )
    return layer, g


@pytest.mark.parametrize("impl", ["reference", "compiled", "cpu"])
@pytest.mark.parametrize("index", [0, 1])
def test_layer_equals_the_authors_code(index, impl):
    layer, g = golden_layer(index, impl)
    out = layer(g["h"], is_causal=True, rope=rotate_half_rope)
    assert relative_error(out, g["attn_out"]) < 2e-5


@pytest.mark.parametrize("index", [0, 1])
def test_compose_weights_equal_the_authors_code(index):
    layer, g = golden_layer(index, "reference")
    weights = layer.compose(g["h"])
    for composition, made in zip(("pre", "post"), weights, strict=True):
        for side in ("query", "key"):
            for field, name in (("down", "w1"), ("up", "w2"), ("gate", "g")):
                expected = g[f"{composition}{side[0]}_{name}"]
                assert relative_error(getattr(getattr(made, side), field), expected) < 2e-5, (composition, side, field)


@pytest.mark.parametrize(
    ("composition", "before", "after"),
    [("pre", "scores", "composed_scores"), ("post", "probs", "composed_probs")],
)
@pytest.mark.parametrize("index", [0, 1])
def test_compose_equals_the_authors_code(index, composition, before, after):
    g = load_file(GOLDEN / f"golden_layer{index}.safetensors")
    sides = (SideWeights(*(g[f"{composition}{side}_{name}"] for name in ("w1", "w2", "g"))) for side in "qk")
    weights = ComposeWeights(*sides)
    position = torch.arange(16)
    visible = position[:, None] >= position  # scores are compared where the authors' code defines them
    got = compose(g[before], weights)
    assert relative_error(got * visible, g[after] * visible) < 2e-5


class QueryWise(DCAttention):
    defaults = {"key_wise": False, "rank": 1}


class GroupedQueryWise(QueryWise.with_options(num_groups=2)):
    """Subclass of a class created by `with_options`."""


def test_subclasses_override_defaults():

    assert QueryWise(32, 4).compose.hidden.shape == (2 * 8, 32)
    assert GroupedQueryWise(32, 4).compose.hidden.shape == (2 * 2 * 4, 32)
    assert QueryWise(32, 4, rank=2).compose.hidden.shape == (2 * 16, 32)
    assert DCAttention.with_options(num_groups=2, window_size=3)(32, 4).window == 3
    assert DCAttention(32, 4).window is None
    with pytest.raises(ValueError, match=r"unknown options \['ranks'\]; expected rank, "):
        DCAttention.with_options(ranks=1)
    with pytest.raises(ValueError, match="rank='a' must be an integer"):
        DCAttention.with_options(rank="a")


def test_options_as_class_attributes_raise_error():
    with pytest.raises(TypeError, match=r"Old sets \['rank'\] as class attributes; set defaults"):
        type("Old", (DCAttention,), {"rank": 1})


def test_copies_of_compiled_layers_have_independent_parameters():
    layer = DCAttention.with_options(rank=1)(32, 4)
    layer.compile(backend="eager")
    x = torch.randn(1, 6, 32)
    layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer)
        for parameter in other.parameters():
            torch.nn.init.zeros_(parameter)
        assert not other(x).any() and layer(x).any()


def test_plain_attention_ignores_num_groups():
    assert PLAIN(32, 4, num_groups=3)(torch.randn(1, 5, 32)).shape == (1, 5, 32)
    with pytest.raises(ValueError, match="num_groups=3 must be a positive divisor of num_heads=4"):
        DCAttention(32, 4, num_groups=3)


def test_layers_made_with_options_can_be_pickled():
    layer = DCAttention.with_options(rank=1).with_options(window_size=3)(32, 4)
    again = pickle.loads(pickle.dumps(layer))
    x = torch.randn(1, 6, 32)
    assert torch.equal(again(x), layer(x))
    assert again.window == 3 and type(again)(32, 4).options.rank == 1
    assert type(pickle.loads(pickle.dumps(GroupedQueryWise(32, 4)))) is GroupedQueryWise


def test_resolved_impl_is_set_by_the_first_call():
    x = torch.randn(1, 4, 32)
    for cls, impl, expected in (
        (DCAttention, "auto", "cpu"),
        (DCAttention, "compiled", "compiled"),
        (DCAttention, "reference", "reference"),
        (PLAIN, "auto", "sdpa"),
    ):
        layer = cls(32, 4, impl=impl)
        assert layer.resolved_impl is None
        layer(x)
        assert layer.resolved_impl == expected


def test_window_size_and_num_groups_are_passed_to_the_operator():
    torch.manual_seed(0)
    x = torch.randn(1, 12, 32)
    layer = DCAttention(32, 4, window_size=3)
    x2 = x.clone()
    x2[:, 0] += 1
    changed = (layer(x) - layer(x2)).abs().amax(-1)[0] > 0
    assert changed.tolist() == [True] * 3 + [False] * 9
    grouped = DCAttention(32, 4, num_groups=2)
    assert grouped.compose.project.shape == (8, 8, 8)
    assert grouped(x).shape == x.shape


class GrowingCache:
    """Simplest cache that implements the protocol of the layer. It keeps all tokens."""

    def __init__(self, window_size=None):
        self.k = self.v = self.keys = None
        self.window_size = window_size

    def update(self, k, v, pre, post):
        keys = [weights.key for weights in (pre, post)]
        if self.k is not None:
            k, v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
            keys = [
                SideWeights(*(torch.cat(pair, 1) for pair in zip(old, new, strict=True)))
                for old, new in zip(self.keys, keys, strict=True)
            ]
        self.k, self.v, self.keys = k, v, keys
        return CacheView(k, v, pre._replace(key=keys[0]), post._replace(key=keys[1]), None, True, self.window_size)


@pytest.mark.parametrize("num_kv_heads", [None, 2])
@pytest.mark.parametrize("window_size", [None, 4])
def test_decoding_with_a_cache_equals_the_full_call(window_size, num_kv_heads):
    torch.manual_seed(0)
    layer = DCAttention(32, 4, window_size=window_size, num_kv_heads=num_kv_heads).double()
    with torch.no_grad():
        layer.compose.project.mul_(100)
        x = torch.randn(2, 11, 32, dtype=torch.float64)
        full = layer(x, is_causal=True)
        cache = GrowingCache(window_size)
        parts = [layer(part, is_causal=True, cache=cache) for part in x.split([5, 1, 1, 3, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-11, atol=1e-11)


# Relative L2 error under autocast against float64, measured over four seeds: bfloat16 0.0084 to 0.0095, float16 0.0010
# to 0.0012. The bounds are about 1.5 times the largest error.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.014), (torch.float16, 0.0018)], ids=str)
def test_autocast_error_against_float64_is_bounded(dtype, bound):
    torch.manual_seed(0)
    layer = DCAttention(64, 4, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm)
    with torch.no_grad():
        layer.compose.project.mul_(50)
        layer.compose.gate.mul_(20)
    x = torch.randn(4, 50, 64)
    with torch.autocast("cpu", dtype):
        low = layer(x)
    exact = layer.double()(x.double())
    assert low.dtype == dtype
    error = relative_error(low.double(), exact)
    assert 1e-5 < error < bound


@pytest.mark.parametrize("impl", ["reference", "compiled", "cpu", "triton"])
@pytest.mark.parametrize("options", [{}, {"pre_compose": False, "post_compose": False}], ids=str)
def test_grouped_query_attention_equals_repeated_keys_and_values(impl, options):
    """Compare grouped-query attention with attention whose k and v rows are repeated, including gradients."""
    torch.manual_seed(0)
    dtype = torch.float32 if impl in ("cpu", "triton") else torch.float64
    shared = DCAttention(48, 6, num_kv_heads=2, qkv_bias=True, impl=impl, dtype=dtype, **options)
    whole = DCAttention(48, 6, qkv_bias=True, impl=impl, dtype=dtype, **options)
    x = torch.randn(2, 11, 48, dtype=dtype, requires_grad=True)

    def repeated(rows: torch.Tensor) -> torch.Tensor:
        q, k, v = rows.unflatten(0, (-1, 8)).split([6, 2, 2])
        return torch.cat([q, k.repeat_interleave(3, 0), v.repeat_interleave(3, 0)]).flatten(0, 1)

    expected = torch.func.functional_call(
        whole, dict(shared.named_parameters()) | {f"qkv.{n}": repeated(p) for n, p in shared.qkv.named_parameters()}, x
    )
    got, inputs = shared(x), [x, *shared.parameters()]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    gradients = [torch.autograd.grad(y.square().sum(), inputs) for y in (got, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=10 * tolerance)


def test_documents_do_not_attend_to_each_other():
    layer = DCAttention(32, 4, window_size=5).double()
    x, document_ids = torch.randn(2, 9, 32, dtype=torch.float64), torch.tensor([[7] * 4 + [3] * 5, [1] * 9])
    got = layer(x, is_causal=True, document_ids=document_ids)
    alone = torch.cat([layer(x[:1, :4], is_causal=True), layer(x[:1, 4:], is_causal=True)], 1)
    torch.testing.assert_close(got, torch.cat([alone, layer(x[1:], is_causal=True)]), rtol=1e-11, atol=1e-11)
    document_ids[0] = 1  # changed in place: the first row becomes one document
    torch.testing.assert_close(layer(x, is_causal=True, document_ids=document_ids), layer(x, is_causal=True))
    with pytest.raises(ValueError, match="document_ids and cache cannot be combined"):
        layer(x, document_ids=document_ids, cache=GrowingCache())
    with pytest.raises(ValueError, match="is_causal=False: expected True when a cache is given"):
        layer(x, cache=GrowingCache())
    with pytest.raises(ValueError, match="attn_mask and cache cannot be combined"):
        layer(x, torch.ones(9, 9, dtype=torch.bool), is_causal=True, cache=GrowingCache())
    with pytest.raises(ValueError, match="the cache is for window_size=None; got a layer with 5"):
        layer(x, is_causal=True, cache=GrowingCache())


@pytest.mark.parametrize("options", [{}, {"pre_compose": False, "post_compose": False}], ids=str)
def test_layers_share_one_document_mask(options, monkeypatch):
    made, make = [], masking.same_document
    monkeypatch.setattr(masking, "same_document", lambda *args: made.append(make(*args)) or made[-1])
    document_ids = masking.document_bounds(torch.tensor([[1, 1, 2, 2, 2]]))
    for _ in range(3):
        DCAttention(32, 4, **options)(torch.randn(1, 5, 32), document_ids=document_ids)
    assert len(made) == 1


def test_invalid_layer_arguments_raise_error():
    for arguments, message in (
        ({"dim": 32, "num_heads": 5}, r"dim=32 must be divisible by num_heads=5"),
        ({"dim": 32, "num_heads": 4, "num_groups": 3}, r"num_groups=3 must be a positive divisor of num_heads=4"),
        ({"dim": 32, "num_heads": 4, "qk_norm": True}, r"norm_layer=None; qk_norm and scale_norm need a norm layer"),
        ({"dim": 32, "num_heads": 4, "impl": "fast"}, r"impl='fast' is unknown"),
        ({"dim": 32, "num_heads": 4, "num_kv_heads": 3}, r"num_kv_heads=3 must be a positive divisor of num_heads=4"),
        ({"dim": 32, "num_heads": 4, "num_kv_heads": 0}, r"num_kv_heads=0"),
        ({"dim": 32, "num_heads": 4, "window_size": 0}, r"window_size=0 must be an integer, at least 1"),
        ({"dim": 32, "num_heads": 4, "window_size": 2.5}, r"window_size=2.5 must be an integer"),
        ({"dim": 32, "num_heads": 4, "ranks": 2}, r"unknown options \['ranks'\]; expected rank, "),
    ):
        with pytest.raises(ValueError, match=message):
            DCAttention(**arguments)
    with pytest.raises(ValueError, match=r"x has shape \[2, 5, 31\]; expected .*\[B, T, C\] with C = 32"):
        DCAttention(32, 4)(torch.zeros(2, 5, 31))

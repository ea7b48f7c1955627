"""Cross-attention from one sequence to another, with padding."""

import pytest
import torch

from dcmha import DCAttention, DCCrossAttention


def make(**options) -> DCCrossAttention:
    torch.manual_seed(0)
    layer = DCCrossAttention(32, 4, context_dim=24, **options).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("project"):
                parameter.mul_(50)
    return layer


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 5, 32).double(), torch.randn(2, 9, 24).double()


@pytest.mark.parametrize(
    "options", [{}, {"static_base": True, "num_groups": 2}, {"key_wise": False}, {"query_wise": False}]
)
def test_cross_attention_of_a_sequence_to_itself_equals_self_attention(options):
    torch.manual_seed(0)
    layer = DCAttention(32, 4, qkv_bias=True, **options).double()
    cross = DCCrossAttention(32, 4, qkv_bias=True, **options).double()
    with torch.no_grad():
        layer.compose.project.mul_(50)
        q, kv = layer.qkv.weight.split([32, 64])
        cross.q.weight.copy_(q)
        cross.kv.weight.copy_(kv)
        q, kv = layer.qkv.bias.split([32, 64])
        cross.q.bias.copy_(q)
        cross.kv.bias.copy_(kv)
        cross.proj.load_state_dict(layer.proj.state_dict())
        sides = [side for side in (cross.compose.query, cross.compose.key) if side is not None]
        for name in ("hidden", "project", "gate"):
            for side, part in zip(sides, getattr(layer.compose, name).chunk(len(sides)), strict=True):
                getattr(side, name).copy_(part)
        if layer.compose.base is not None:
            cross.compose.query.base.copy_(layer.compose.base)
    x = torch.randn(2, 7, 32).double()
    torch.testing.assert_close(cross(x, x), layer(x))


@pytest.mark.parametrize("impl", ["reference", "compiled", "cpu", "triton"])
def test_implementations_match_float64_output(impl):
    x, context = (t.float().requires_grad_() for t in sequences())
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 4:] = False
    layer = make().float()
    expected = make()(x.double(), context.double(), mask)
    layer.impl = impl
    out = layer(x, context, mask)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in (*layer.parameters(), x, context))


def test_padded_context_tokens_do_not_change_the_output():
    layer, (x, context) = make(), sequences()
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, 6:] = False
    other = context.clone()
    other[:, 6:] = 100.0
    torch.testing.assert_close(layer(x, other, mask), layer(x, context[:, :6]))
    torch.testing.assert_close(layer(x, other, attn_mask=mask[:, None, None]), layer(x, context[:, :6]))
    mask[0] = False
    torch.testing.assert_close(layer(x, context, mask)[0], layer.proj.bias.expand(5, 32))


def test_without_compositions_equals_plain_cross_attention():
    layer, (x, context) = make(pre_compose=False, post_compose=False), sequences()
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 3:] = False
    q = layer.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
    k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in layer.kv(context).chunk(2, -1))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask[:, None, None])
    torch.testing.assert_close(layer(x, context, mask), layer.proj(out.transpose(1, 2).flatten(2)))
    assert not [name for name, _ in layer.named_parameters() if "compose" in name]


@pytest.mark.parametrize(
    "options", [{}, {"key_wise": False}, {"query_wise": False}, {"pre_compose": False, "post_compose": False}]
)
def test_precomputed_context_gives_the_same_output(options):
    """The precomputed context is sufficient for later tokens and for other rows of the batch."""
    layer, (x, context) = make(**options), sequences()
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 3:] = False
    expected = layer(x, context, mask)
    seen = layer.precompute_kv(context, mask)
    context.fill_(100.0)
    torch.testing.assert_close(torch.cat([layer(part, seen) for part in x.split([1, 3, 1], 1)], 1), expected)
    rows = torch.tensor([1, 1, 0])
    torch.testing.assert_close(layer(x[rows], seen.rows(rows)), expected[rows])


@pytest.mark.parametrize("branch", ["query", "key"])
def test_each_side_of_the_compose_weights_depends_only_on_its_sequence(branch):
    """A change of one sequence changes only the compose weights of its side."""
    layer, (x, context) = make(), sequences()
    pre, post = layer.compose(x, context)
    moved = layer.compose(x + 1, context) if branch == "query" else layer.compose(x, context + 1)
    for old, new in zip((pre, post), moved, strict=True):
        for field in ("down", "up", "gate"):
            for side in ("query", "key"):
                same = torch.equal(getattr(getattr(old, side), field), getattr(getattr(new, side), field))
                assert same == (side != branch)


def test_invalid_input_raises_error():
    layer, (x, context) = make(), sequences()
    with pytest.raises(ValueError, match=r"x has shape \[2, 9, 24\]; expected \[2, tokens, 32\]"):
        layer(context, context)
    with pytest.raises(ValueError, match=r"context has shape \[1, 9, 24\]; expected \[2, tokens, 24\]"):
        layer(x, context[:1])
    with pytest.raises(ValueError, match=r"context_mask has shape \[2, 5\].*expected \[2, 9\], torch.bool"):
        layer(x, context, torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="nothing is left to compose"):
        make(query_wise=False, key_wise=False)
    with pytest.raises(ValueError, match=r"x has shape \[1, 5, 32\]; expected \[2, tokens, 32\]"):
        layer(x[:1], layer.precompute_kv(context))
    with pytest.raises(ValueError, match="context_mask cannot be combined with a precomputed context"):
        layer(x, layer.precompute_kv(context), torch.ones(2, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"context has shape \[2, 5, 32\]; expected \[B, tokens, 24\]"):
        layer.precompute_kv(x)
    with pytest.raises(ValueError, match=r"unknown options \['window_size'\]; expected rank, "):
        make(window_size=3)
    with pytest.raises(ValueError, match="dim=30 must be divisible by num_heads=4"):
        DCCrossAttention(30, 4)
    for name in ("context_dim", "attn_head_dim", "dim_out"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            DCCrossAttention(32, 4, **{name: 0})

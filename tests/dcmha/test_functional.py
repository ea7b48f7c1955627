"""The operator against loops, SDPA, theorems and other implementations; masks, causality and invalid arguments."""

import pytest
import torch

from dcmha import ComposeWeights, SideWeights, composed_attention
from dcmha.impl.compiled.blocks import QueryBlock, attend

from .inputs import (
    BRANCHES,
    Case,
    make_mask,
    make_operands,
    output_and_gradients,
    relative_error,
    run,
    tolerance,
    weights_of,
)

EXACT = ("reference", "compiled")  # accurate to float64 rounding
IMPLS = (*EXACT, "cpu")


def loop_compose(a, w, b, i, j, groups):
    """Apply equation 7 to the head vector `a` of one query-key pair, one head at a time."""
    H = len(a)
    size = H // groups
    out = a.clone()
    for h in range(H):
        group = slice(h // size * size, (h // size + 1) * size)
        if w.base is not None:
            out[h] += a[group] @ w.base[h // size, :, h % size]
        for (down, up, gate), n in ((w.query, i), (w.key, j)):
            for r in range(0 if down is None else down.shape[2]):
                out[h] += (a[group] @ down[b, n, r, group]) * up[b, n, r, h]
            if gate is not None:
                out[h] += a[h] * gate[b, n, h]
    return out


def loop_attention(q, k, v, pre, post, case, mask=None):
    B, H, T, D = q.shape
    S = k.shape[2]
    out = torch.zeros_like(q)
    for b in range(B):
        for i in range(T):
            position = i + S - T
            scores = torch.full((S, H), -torch.inf, dtype=q.dtype)
            for j in range(S):
                distance = position - j
                hidden = case.is_causal and distance < 0
                hidden |= case.window_size is not None and abs(distance) >= case.window_size
                hidden |= mask is not None and not mask[b, 0, i, j]
                if not hidden:
                    a = (q[b, :, i] * k[b, :, j]).sum(-1) / D**0.5
                    scores[j] = loop_compose(a, pre, b, i, j, case.G)
            if torch.isinf(scores).all():
                continue
            weights = scores.softmax(0)
            for j in range(S):
                out[b, :, i] += loop_compose(weights[j], post, b, i, j, case.G)[:, None] * v[b, :, j]
    return out


LOOP_CASES = [
    Case(T=5, S=5, H=4, D=3),
    Case(T=4, S=6, H=4, D=3, G=2, is_causal=True),
    Case(T=6, S=4, H=4, D=3, is_causal=True, window_size=2),
    Case(T=5, S=5, H=3, D=3, R=1, window_size=2, mask="bool"),
]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", LOOP_CASES, ids=str)
def test_operator_equals_equation_7_for_each_query_key_pair(case, impl):
    x = {name: value.detach() for name, value in make_operands(case).items()}
    mask = make_mask(case)
    weights = [weights_of(x, composition) for composition in ("pre", "post")]
    expected = loop_attention(x["q"], x["k"], x["v"], *weights, case, mask)
    assert relative_error(run(case, x, impl, mask), expected) < tolerance(impl)


GRID = [
    Case(),
    Case(T=1, S=1),
    Case(T=1, S=63, is_causal=True),
    Case(T=63, S=63, H=3, is_causal=True),
    Case(T=300, S=300, H=4, D=8, B=1),
    Case(T=300, S=300, H=4, D=8, B=1, is_causal=True),
    Case(T=300, S=300, H=4, D=8, B=1, is_causal=True, window_size=40),
    Case(T=300, S=300, H=4, D=8, B=1, window_size=7),
    Case(T=300, S=260, H=4, D=8, B=1, is_causal=True),
    Case(T=260, S=300, H=4, D=8, B=1, is_causal=True, window_size=150, mask="bool"),
    Case(T=400, S=40, H=4, D=8, B=1, is_causal=True, window_size=5),
    Case(T=270, S=270, H=4, D=8, mask="bool"),
    Case(T=270, S=30, H=4, D=8, mask="float"),
    Case(T=33, S=50, mask="float-inf", is_causal=True),
    Case(R=0),
    Case(R=1, G=2),
    Case(R=4, G=3),
    Case(H=12, G=2, branches="qk"),
    Case(branches="q"),
    Case(branches="k"),
    Case(branches="qg"),
    Case(branches="kg", T=300, S=300, H=4, D=8, B=1, is_causal=True),
    Case(branches="b"),
    Case(compositions="pre"),
    Case(compositions="post", is_causal=True),
]


@pytest.mark.parametrize("impl", IMPLS[1:])
@pytest.mark.parametrize("case", GRID, ids=str)
def test_implementations_equal_the_reference(case, impl):
    expected = output_and_gradients(case, "reference")
    got = output_and_gradients(case, impl)
    for name, value in expected.items():
        assert relative_error(got[name], value) < tolerance(impl), name


CHUNKS = Case(B=1, T=300, S=300, H=2, D=4, is_causal=True, window_size=30)


@pytest.mark.parametrize("case", [Case(T=20, S=20, mask="bool"), pytest.param(CHUNKS, marks=pytest.mark.slow)], ids=str)
def test_operator_is_traced_into_one_graph(case):
    compiled_run = torch.compile(run, fullgraph=True, backend="aot_eager")
    operands, mask = make_operands(case), make_mask(case)
    expected = run(case, operands, "reference", mask)
    got = compiled_run(case, operands, "compiled", mask)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(y.square().sum(), list(operands.values())) for y in (expected, got)]
    for name, a, b in zip(operands, *gradients, strict=True):
        assert relative_error(b, a) < 1e-12, name


@pytest.mark.long
def test_chunk_compiled_with_inductor_matches_eager():
    """Compile the per-chunk function, which CUDA compiles, for the CPU with dynamic shapes, forward and backward."""
    compiled = torch.compile(attend, dynamic=True, fullgraph=True)
    for T, S in ((24, 40), (17, 31)):
        operands = make_operands(Case(T=T, S=S, H=4, D=8), torch.float32)
        pre, post = (weights_of(operands, composition) for composition in ("pre", "post"))
        block = QueryBlock(*(operands[n] for n in "qkv"), pre, post, None, None, 0.3, 1, True, False, 0.0, None)
        results = [f(block) for f in (attend, compiled)]
        gradients = [torch.autograd.grad(y.square().sum(), list(operands.values())) for y in results]
        for name, a, b in zip(
            ("out", *operands), *[(y, *g) for y, g in zip(results, gradients, strict=True)], strict=True
        ):
            assert relative_error(b.double(), a.double()) < 1e-5, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [Case(T=64, S=64, H=6, D=32), Case(B=1, T=300, S=300, H=4, is_causal=True)], ids=str)
def test_low_precision_error_is_at_most_that_of_the_reference(case, dtype):
    """Compare all implementations with float64 on the rounded inputs.

    Internal float32 arithmetic must not be less accurate than rounding after every step. For float32 operands, "cpu"
    has another tolerance because its plain sums have a few more rounding errors than those of a library.
    """
    rounded = {k: x.detach().to(dtype).double().requires_grad_() for k, x in make_operands(case).items()}
    exact_out = run(case, rounded, "reference")
    cotangent = torch.randn(exact_out.shape, dtype=torch.float64).to(dtype)
    exact = (exact_out, *torch.autograd.grad(exact_out, list(rounded.values()), cotangent.double()))
    errors = {}
    for impl in IMPLS:
        low = {k: x.detach().to(dtype).requires_grad_() for k, x in rounded.items()}
        out = run(case, low, impl)
        got = (out, *torch.autograd.grad(out, list(low.values()), cotangent))
        errors[impl] = [relative_error(g.double(), e) for g, e in zip(got, exact, strict=True)]
    band = torch.finfo(dtype).eps
    for name, reference, in_chunks, cpu in zip(("out", *rounded), *errors.values(), strict=True):
        assert in_chunks <= reference + band, (name, in_chunks, reference)
        assert cpu <= (tolerance("cpu") if dtype == torch.float32 else reference + band), (name, cpu, reference)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("factor", [1, 128], ids="x{}".format)  # powers of two: scaling is exact in bfloat16
def test_bfloat16_error_is_below_its_machine_epsilon(impl, factor):
    """All arithmetic between the 16-bit inputs and the 16-bit results is float32, also for large scores."""
    case = Case(T=50, S=50, H=6, D=64, is_causal=True)
    rounded = {k: x.detach().bfloat16().double() for k, x in make_operands(case).items()}
    rounded["q"] *= factor
    errors = errors_of(case, rounded, impl, torch.bfloat16)
    assert max(errors.values()) < torch.finfo(torch.bfloat16).eps, errors


@pytest.mark.parametrize("impl", IMPLS)
def test_error_for_large_scores_is_bounded_by_their_float32_rounding(impl):
    """The errors of weights and gradients are a small multiple of the rounding error of scores of several hundred."""
    case = Case(T=50, S=50, H=6, D=64)
    rounded = {k: x.detach().float().double() for k, x in make_operands(case).items()}
    rounded["q"] *= 128
    largest = (torch.einsum("bhtd,bhsd->bhts", rounded["q"], rounded["k"]) / case.D**0.5).abs().max().item()
    errors = errors_of(case, rounded, impl, torch.float32)
    assert max(errors.values()) < 8 * torch.finfo(torch.float32).eps * largest, errors


def errors_of(case, rounded: dict[str, torch.Tensor], impl: str, dtype: torch.dtype) -> dict[str, float]:
    """Return relative errors of the output and gradients in a dtype against the float64 reference."""

    def results(impl, dtype):
        operands = {k: x.to(dtype).requires_grad_() for k, x in rounded.items()}
        out = run(case, operands, impl)
        return out, *torch.autograd.grad(out, list(operands.values()), cotangent.to(dtype))

    cotangent = torch.randn(rounded["q"].shape, dtype=torch.float64).to(dtype).double()
    pairs = zip(results(impl, dtype), results("reference", torch.float64), strict=True)
    return {k: relative_error(a.double(), b) for k, (a, b) in zip(("out", *rounded), pairs, strict=True)}


@pytest.mark.parametrize("impl", EXACT)
def test_gradients_pass_gradcheck(impl):
    case = Case(B=1, T=3, S=4, H=4, D=2, G=2, R=1, is_causal=True, mask="bool")
    operands, mask = make_operands(case), make_mask(case)
    names = list(operands)
    assert torch.autograd.gradcheck(
        lambda *xs: run(case, dict(zip(names, xs, strict=True)), impl, mask), list(operands.values())
    )


@pytest.mark.parametrize("impl", EXACT)
def test_gradients_with_a_bias_pass_gradcheck(impl):
    case = Case(B=1, T=5, S=5, H=2, D=2, R=1, is_causal=True, window_size=3, mask="float")
    operands, mask = make_operands(case), make_mask(case)

    def call(bias: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        named = dict(zip(operands, values, strict=True))
        return run(case, named, impl, bias)

    assert torch.autograd.gradcheck(call, [mask.clone().requires_grad_(), *operands.values()])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "case", [Case(), Case(is_causal=True, T=20), Case(mask="bool"), Case(mask="float-inf")], ids=str
)
def test_identity_weights_equal_sdpa(case, impl):
    operands, mask = make_operands(case), make_mask(case)
    got = run(case, {n: operands[n] for n in "qkv"}, impl, mask)
    plain = composed_attention(*(operands[n] for n in "qkv"), attn_mask=mask, is_causal=case.is_causal)
    assert relative_error(got, plain) < tolerance(impl)


@pytest.mark.parametrize(
    "case", [Case(), Case(is_causal=True), Case(mask="bool"), Case(T=9, S=20, is_causal=True)], ids=str
)
def test_without_compositions_equals_softmax_attention(case):
    operands, mask = make_operands(case), make_mask(case)
    q, k, v = (operands[n] for n in "qkv")
    bias = torch.zeros(case.T, case.S, dtype=torch.float64)
    if case.is_causal:
        bias.masked_fill_(~torch.ones(case.T, case.S).bool().tril(case.S - case.T), -torch.inf)
    if mask is not None:
        bias = bias + torch.zeros(mask.shape, dtype=torch.float64).masked_fill_(~mask, -torch.inf)
    expected = ((q @ k.mT) / case.D**0.5 + bias).softmax(-1).nan_to_num() @ v
    got = composed_attention(q, k, v, attn_mask=mask, is_causal=case.is_causal)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(got.sum(), q)
    assert gradient.isfinite().all()


def test_theorem_2_1_composing_scores_expands_query_key_projections():
    B, T, H, D, C = 2, 7, 4, 5, 12
    torch.manual_seed(0)
    x, wq, wk, wv = torch.randn(B, T, C).double(), *torch.randn(3, H, C, D).double()
    composition = torch.randn(H, H).double()  # C_hj: axes (to head h, from head j)
    q, k, v = (torch.einsum("btc,hcd->bhtd", x, w) for w in (wq, wk, wv))
    base = (composition.T - torch.eye(H))[None]
    got = composed_attention(q, k, v, pre=ComposeWeights(base=base), scale=1.0, impl="reference")
    expanded_q = torch.stack([torch.cat([composition[i, j] * wq[j] for j in range(H)], 1) for i in range(H)])
    expanded_k = torch.cat(list(wk), 1).expand(H, -1, -1)
    scores = torch.einsum("btc,hcd,bse,hed->bhts", x, expanded_q, x, expanded_k)
    torch.testing.assert_close(got, scores.softmax(-1) @ v, rtol=1e-10, atol=1e-10)


def test_theorem_2_2_composing_weights_expands_output_value_projections():
    B, T, H, D, C = 2, 7, 4, 5, 12
    torch.manual_seed(0)
    x, wv = torch.randn(B, T, C).double(), torch.randn(H, C, D).double()
    q, k = torch.randn(2, B, H, T, D).double()
    wo = torch.randn(H, D, C).double()
    composition = torch.randn(H, H).double()
    base = (composition.T - torch.eye(H))[None]
    v = torch.einsum("btc,hcd->bhtd", x, wv)
    composed = composed_attention(q, k, v, post=ComposeWeights(base=base), impl="reference")
    got = torch.einsum("bhtd,hdc->btc", composed, wo)
    # Equation 2 composes over the index that the tiled output projection sums over: head i has sum_j C_ji V_j W_j^O.
    weights = (q @ k.mT / D**0.5).softmax(-1)
    values = torch.stack([torch.cat([composition[j, i] * wv[j] for j in range(H)], 1) for i in range(H)])
    tiled = torch.cat(list(wo), 0)
    expected = sum((weights[:, i] @ (x @ values[i])) @ tiled for i in range(H))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("composition", ["pre", "post"])
@pytest.mark.parametrize("branch", BRANCHES)
def test_each_branch_changes_the_output(impl, composition, branch):
    case = Case(T=9, S=9)
    operands = {k: x.detach() for k, x in make_operands(case).items()}
    before = run(case, operands, impl)
    operands[f"{composition}.{branch}"] = operands[f"{composition}.{branch}"] * 1.5
    assert relative_error(run(case, operands, impl), before) > 1e-3


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("T", [40, 300])
def test_causal_outputs_do_not_depend_on_later_tokens(impl, T):
    """Outputs before token t stay bit-identical if the operands of token t change, including key-side weights."""
    case = Case(B=1, T=T, S=T, H=4, D=8, is_causal=True)
    operands = {k: x.detach() for k, x in make_operands(case, torch.float32).items()}
    before = run(case, operands, impl)
    t = T - 13
    for name, x in operands.items():
        if name.endswith("base"):
            continue
        axis = 2 if name in "qkv" else 1
        operands[name] = x.index_fill(axis, torch.tensor([t]), 3.0)
    after = run(case, operands, impl)
    assert torch.equal(before[:, :, :t], after[:, :, :t])
    assert not torch.equal(before[:, :, t:], after[:, :, t:])


@pytest.mark.parametrize("impl", IMPLS)
def test_queries_without_visible_keys_have_zero_output_and_finite_gradients(impl):
    case = Case(T=12, S=7, is_causal=True, mask="bool")
    operands, mask = make_operands(case), make_mask(case)
    out = run(case, operands, impl, mask)
    assert torch.equal(out[:, :, :5], torch.zeros_like(out[:, :, :5]))
    assert out[:, :, 8:].abs().sum() > 0
    for name, gradient in zip(operands, torch.autograd.grad(out.sum(), list(operands.values())), strict=True):
        assert gradient.isfinite().all(), name


@pytest.mark.parametrize("impl", IMPLS)
def test_mask_values_below_the_dtype_range_hide_keys(impl):
    case = Case(T=4, S=4)
    operands = {k: x.detach() for k, x in make_operands(case, torch.float16).items()}
    mask = torch.zeros(4, 4)
    mask[1] = torch.finfo(torch.float32).min
    out = run(case, operands, impl, mask)
    assert out.isfinite().all() and out[:, :, 1].abs().sum() == 0 and out[:, :, 2].abs().sum() > 0


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", [Case(B=0), Case(T=0), Case(S=0), Case(T=0, S=0)], ids=str)
def test_empty_inputs_give_empty_or_zero_results(case, impl):
    got = output_and_gradients(case, impl)
    assert got["out"].shape == (case.B, case.H, case.T, case.D)
    assert all(x.abs().sum() == 0 for x in got.values())


@pytest.mark.parametrize("impl", ["reference", "compiled"])
def test_dropout_is_applied_to_composed_weights(impl):
    case = Case(T=8, S=8, D=2, compositions="post", branches="b")
    operands = make_operands(case)
    q, k, v = (operands[n].detach() for n in "qkv")
    post = ComposeWeights(base=operands["post.base"].detach())
    kept = composed_attention(q, k, torch.ones_like(v), None, post, impl=impl)
    torch.manual_seed(1)
    samples = [composed_attention(q, k, torch.ones_like(v), None, post, dropout_p=0.5, impl=impl) for _ in range(2000)]
    mean = torch.stack(samples).mean(0)
    assert not torch.equal(samples[0], kept)
    assert relative_error(mean, kept) < 0.05


def test_recomputed_backward_uses_the_dropout_mask_of_the_forward():
    """If every chunk is recomputed, the gradients use the dropout mask of the forward pass."""
    q, k, v = torch.randn(3, 1, 2, 300, 4, dtype=torch.float64).unbind(0)
    v.requires_grad_()
    torch.manual_seed(3)
    out = composed_attention(q, k, v, ComposeWeights(), ComposeWeights(), dropout_p=0.5, impl="compiled")
    (gradient,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((gradient * v).sum(), out.sum())  # the output is linear in v


def test_autocast_equals_call_with_bfloat16_operands():
    case = Case(T=64, S=64, D=32)
    operands = {k: x.detach() for k, x in make_operands(case, torch.float32).items()}
    with torch.autocast("cpu", torch.bfloat16):
        got = run(case, operands, "auto")
    assert got.dtype == torch.bfloat16
    rounded = {k: x.to(torch.bfloat16) for k, x in operands.items()}
    assert torch.equal(got, run(case, rounded, "cpu"))


Q = torch.zeros(2, 4, 5, 8)
GATE = torch.zeros(2, 5, 4)
RANK = torch.zeros(2, 5, 2, 4)
IDENTITY = ComposeWeights()
MISTAKES = {
    "axes": ({"q": torch.zeros(4, 5, 8)}, r"q has shape \[4, 5, 8\]; expected four axes \[B, H, tokens, D\]"),
    "integer": ({"k": Q.long()}, r"k has dtype torch.int64; expected a floating dtype"),
    "kv": ({"v": Q[:, :, :3]}, r"k and v must have one shape .* \[2, 4, 5, 8\] and \[2, 4, 3, 8\]"),
    "heads": ({"q": Q[:, :2]}, r"q and k must agree in B and D, .*; got q \[2, 2, 5, 8\]"),
    "dtype": ({"q": Q.double()}, r"q, k and v must have one dtype and device; got q torch.float64 on cpu"),
    "window_size": ({"window_size": 0}, r"window_size=0 must be an integer, at least 1"),
    "dropout": ({"dropout_p": 1.0}, r"dropout_p=1.0 must be in \[0, 1\)"),
    "groups": ({"num_groups": 3}, r"num_groups=3 must be a positive divisor of the 4 heads of q"),
    "impl": ({"impl": "flash"}, r"impl='flash' is unknown; expected 'auto', 'reference', 'compiled', 'cpu', 'triton'"),
    "cpu": (
        {"impl": "cpu", "dropout_p": 0.1, "pre": IDENTITY},
        r"impl='cpu' cannot run: it does not support dropout; use impl=",
    ),
    "mask": (
        {"attn_mask": torch.ones(3, 5).bool()},
        r"attn_mask has shape \[3, 5\]; expected broadcastable to \[B, H, T, S\] = \[2, 4, 5, 5\]",
    ),
    "mask axes": ({"attn_mask": torch.ones(1, 1, 1, 1, 5).bool()}, r"attn_mask has shape"),
    "gate": (
        {"pre": ComposeWeights(SideWeights(gate=GATE[:, :3]))},
        r"pre.query.gate has shape \[2, 3, 4\]; expected \[B, tokens, H\] = \[2, 5, 4\]",
    ),
    "rank": (
        {"post": ComposeWeights(key=SideWeights(RANK, RANK[:, :, :1]))},
        r"post.key.up has shape \[2, 5, 1, 4\]; expected \[B, tokens, R, H\] = \[2, 5, 2, 4\]",
    ),
    "pair": ({"pre": ComposeWeights(SideWeights(down=RANK))}, r"pre.query.down and pre.query.up must both be given"),
    "side": ({"pre": ComposeWeights(key=GATE)}, r"pre.key is Tensor; expected SideWeights"),
    "seven fields": ({"pre": (None,) * 7}, r"pre is tuple; expected ComposeWeights\(query, key, base\), or None"),
    "no side": ({"pre": ComposeWeights(None)}, r"pre.query is NoneType; expected SideWeights"),
    "base": (
        {"pre": ComposeWeights(base=torch.zeros(1, 4, 4)), "num_groups": 2},
        r"pre.base has shape \[1, 4, 4\]; expected \[G, H/G, H/G\] = \[2, 2, 2\]",
    ),
    "weight dtype": (
        {"pre": ComposeWeights(SideWeights(gate=GATE.double()))},
        r"pre.query.gate is torch.float64 on cpu",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_arguments_raise_error(name):
    change, message = MISTAKES[name]
    arguments = {"q": Q, "k": Q, "v": Q} | change
    with pytest.raises(ValueError, match=message):
        composed_attention(**arguments)


def test_integer_mask_raises_type_error():
    with pytest.raises(TypeError, match=r"attn_mask has dtype torch.int64; expected torch.bool"):
        composed_attention(Q, Q, Q, attn_mask=torch.ones(5, 5).long())


def test_masks_of_every_rank_are_broadcast():
    case = Case(T=6, S=6, H=4)
    operands = {k: x.detach() for k, x in make_operands(case).items()}
    keys = torch.tensor([True, True, False, True, True, False])
    expected = run(case, operands, "reference", keys.expand(2, 4, 6, 6))
    for impl in IMPLS:
        for mask in (keys, keys[None], keys[None, None], keys[None, None, None]):
            assert relative_error(run(case, operands, impl, mask), expected) < tolerance(impl)
    assert relative_error(expected, run(case, operands, "reference")) > 1e-3


@pytest.mark.parametrize("impl", IMPLS[1:])
def test_padded_keys_do_not_change_the_output(impl):
    """Keys, values and key-side weights that a key-padding mask hides do not change the output."""
    case = Case(T=6, S=6, H=4)
    operands = {k: x.detach() for k, x in make_operands(case).items()}
    mask = torch.tensor([True] * 4 + [False] * 2)
    before = run(case, operands, impl, mask)
    for name, x in operands.items():
        if name in ("k", "v"):
            x[:, :, 4:] = 7.0
        elif ".key." in name:
            x[:, 4:] = 7.0
    assert torch.equal(run(case, operands, impl, mask), before)

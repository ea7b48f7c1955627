"""The fused kernels against the float64 reference: outputs and every gradient, in the Triton interpreter."""

import itertools
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dcmha import ComposeWeights, DCAttention, SideWeights, composed_attention
from dcmha.impl import chunks
from dcmha.impl.call import AttentionCall
from dcmha.impl.flatten import flatten
from dcmha.impl.masking import document_bounds, key_range
from dcmha.impl.triton import chunked, launch
from dcmha.impl.triton.op import attention
from tests.dcmha.inputs import Case, make_mask, make_operands, output_and_gradients, relative_error, run, weights_of
from tests.dcmha.triton import test_gpu

SHAPES = [
    {"B": 1, "T": 17, "S": 17, "H": 16},
    {"B": 3, "T": 9, "S": 9, "H": 3, "D": 32},
    {"B": 2, "T": 13, "S": 13, "H": 6, "D": 48},
    {"B": 1, "T": 12, "S": 20, "H": 8, "G": 2},
    {"B": 2, "T": 14, "S": 9, "H": 4, "D": 80},  # if causal, the first queries have no visible key
    {"B": 1, "T": 1, "S": 19, "H": 12},
    {"B": 1, "T": 11, "S": 11, "H": 24, "G": 2},
    {"B": 1, "T": 10, "S": 10, "H": 32, "G": 4, "D": 8},
    {"B": 2, "T": 35, "S": 35, "H": 5},
    {"B": 1, "T": 9, "S": 9, "H": 24, "D": 8, "shared": 3},
    {"B": 1, "T": 6, "S": 10, "H": 40, "D": 8},
    {"B": 1, "T": 5, "S": 5, "H": 64, "D": 8, "shared": 8},
]
WINDOWS = [  # window sizes that hide no key, and a window size of 1
    Case(T=9, S=9, H=4, window_size=2**31 - 1, is_causal=True),
    Case(T=9, S=9, H=4, window_size=2**63 - 1),
    Case(B=1, T=5, S=150, H=2, R=1, D=8, window_size=1),
    Case(B=1, T=5, S=150, H=2, R=1, D=8, window_size=1, is_causal=True),
]
KINDS = [{}, {"is_causal": True}, {"is_causal": True, "window_size": 5}, {"window_size": 4}, {"mask": "keys"}]
MASKS = [
    {"mask": "bool"},
    {"mask": "heads"},
    {"mask": "float-inf", "is_causal": True},
    {"mask": "bias 1HTS"},
    {"mask": "bias BHTS", "window_size": 5, "is_causal": True},
    {"mask": "bias H1S", "dropout_p": 0.3},
    {"mask": "bias B1TS", "is_causal": True},
    {"has_documents": True, "is_causal": True},
    {"has_documents": True, "window_size": 4, "dropout_p": 0.6},
    {"has_documents": True, "mask": "bool"},
]
FORMS = [
    {},
    {"compositions": "pre", "R": 1},
    {"compositions": "post", "branches": "qkg"},
    {"branches": "qg", "R": 4},
    {"branches": "kg"},
    {"branches": "b"},
    {"branches": "qk"},
    {"branches": "qkg", "R": 0},
]
# CASES combines every shape with every kind and alternates the forms: each pair of shape and kind, and of kind and
# form, occurs. Every second case is in the first two tiers, so that each shape, kind and form occurs there.
TIERS = ([], [pytest.mark.long], [pytest.mark.slow], [pytest.mark.long])


def marks_of(shape: dict, marks: list) -> list:
    """Return the marks of a case. Large shapes, which run for seconds in the interpreter, are in the second tier."""
    return marks or [pytest.mark.slow] * (shape["H"] >= 16 or shape["T"] > 30)


CASES = [
    pytest.param(Case(**shape | kind | form), marks=marks_of(shape, TIERS[number % 4]))
    for number, ((shape, kind), form) in enumerate(
        zip(itertools.product(SHAPES, KINDS), itertools.cycle(FORMS), strict=False)
    )
]


MASKED = [  # each shape and kind is in the fast tiers in a few cases; documents need at least as many keys as queries
    pytest.param(Case(**shape | kind), marks=marks_of(shape, [pytest.mark.long] * ((row + column) % 10 > 0)))
    for (row, shape), (column, kind) in itertools.product(enumerate(SHAPES), enumerate(MASKS))
    if not ("has_documents" in kind and shape["T"] > shape["S"])
]


def worst_error(case: Case) -> float:
    """Return the largest relative error of the output and the gradients in float32."""
    expected = output_and_gradients(case, "reference")
    got = output_and_gradients(case, "triton", torch.float32)
    return max(relative_error(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("case", CASES + WINDOWS + MASKED, ids=str)
def test_float32_equals_the_reference(case):
    assert worst_error(case) < 3e-6


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_combination_equals_the_reference(shape, kind, form):
    assert worst_error(Case(**shape | kind | form)) < 3e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [SHAPES[0] | {"is_causal": True}, SHAPES[2]], ids=str)
def test_16_bit_error_is_at_most_twice_that_of_the_reference(shape, dtype):
    """Compare the output and every gradient with the reference in the same dtype."""
    case = Case(**shape, branches="qkg")
    rounded = {name: x.detach().to(dtype).double() for name, x in make_operands(case).items()}
    exact = _gradients(case, {n: x.requires_grad_() for n, x in rounded.items()}, "reference", torch.float64)
    errors = {}
    for impl in ("reference", "triton"):
        operands = {name: x.detach().to(dtype).requires_grad_() for name, x in rounded.items()}
        got = _gradients(case, operands, impl, dtype)
        errors[impl] = {name: relative_error(got[name], exact[name]) for name in exact}
    for name, error in errors["triton"].items():
        assert error < 2 * errors["reference"][name] + torch.finfo(dtype).eps, name


def _gradients(case, operands, impl, dtype):
    out = run(case, operands, impl)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    gradients = torch.autograd.grad(out, list(operands.values()), cotangent)
    return {"out": out.detach().double()} | {n: g.double() for n, g in zip(operands, gradients, strict=True)}


CHUNKED = [  # kind of call and workspace budget in KiB
    pytest.param({"T": 19, "S": 37}, 4, marks=pytest.mark.long),
    pytest.param({"T": 37, "S": 37, "is_causal": True}, 16, marks=pytest.mark.long),
    pytest.param({"T": 37, "S": 21, "is_causal": True, "mask": "keys"}, 4, marks=pytest.mark.slow),
    pytest.param({"T": 85, "S": 85, "is_causal": True, "window_size": 7}, 10000, marks=pytest.mark.long),
    pytest.param({"B": 1, "T": 52, "S": 52, "window_size": 14}, 60, marks=pytest.mark.long),
    pytest.param({"T": 70, "S": 97, "is_causal": True, "window_size": 17}, 20, marks=pytest.mark.long),
    pytest.param({"B": 1, "T": 64, "S": 53, "window_size": 5}, 64, marks=pytest.mark.long),
]


@pytest.fixture
def poisoned_memory():
    """Fill uninitialized memory with NaN."""
    torch.use_deterministic_algorithms(True)  # fills memory; the kernels do not need this mode
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("kind", "budget"), CHUNKED, ids=str)
def test_chunks_blocks_and_splits_change_only_rounding(kind, budget, monkeypatch):
    case = Case(**{"B": 2, "H": 3, "D": 8, "R": 1} | kind)
    expected = output_and_gradients(case, "reference")
    plans = []

    def plan(*args, **options):
        plans.append(chunks.chunks(*args, **options))
        return plans[-1]

    monkeypatch.setattr(chunks, "WORKSPACE_MIB", budget / 1024)
    monkeypatch.setattr(chunks, "CHUNK_QUERIES", 64 if case.window_size else 16)
    monkeypatch.setattr(chunks, "BLOCK_QUERIES", 16)
    monkeypatch.setattr(chunked, "chunks", plan)
    monkeypatch.setattr(launch, "SPLIT_TOKENS", 16)
    got = output_and_gradients(case, "triton", torch.float32)
    assert len(plans) == 2 and all(chunk.workspace_size(case.H) * 4 <= budget * 2**10 for chunk in plans[0])
    assert (case.window_size is None and len(plans[0]) > 2) or any(chunk.num_blocks > 1 for chunk in plans[0])
    for name in expected:
        assert relative_error(got[name], expected[name]) < 3e-6, name


@pytest.mark.parametrize("window_size", [0, 1, 100, 1000])
@pytest.mark.parametrize("is_causal", [False, True])
def test_chunks_cover_each_query_once_and_all_its_visible_keys(is_causal, window_size):
    B, H, S = 3, 8, 3000
    for T in (1, 300, 3000, 3100):
        queries = torch.zeros(B, T, dtype=torch.int)
        for chunk in chunks.chunks(B, H, T, S, 2, is_causal, window_size):
            assert chunk.workspace_size(H) * 2 <= chunks.WORKSPACE_MIB * 2**20
            queries[chunk.rows, chunk.queries] += 1
            for block in range(chunk.num_blocks):
                start = chunk.queries.start + block * chunk.block
                stop = min(chunk.queries.stop, start + chunk.block)
                first, last = key_range(start, stop, T, S, is_causal, window_size or None)
                first_key = chunk.first_key + block * chunk.block
                assert start < stop and first_key <= first and last <= first_key + chunk.num_keys
        assert (queries == 1).all()


@pytest.mark.parametrize("window_size", [0, 100, 1000])
@pytest.mark.parametrize("multiple", [2, 4])
def test_chunks_of_several_rows_fit_in_the_workspace_budget(window_size, multiple):
    for B, S in ((1, 12000), (3, 12000), (9, 300), (100, 3000)):
        limits = {"row_multiple": multiple, "most_rows": 8, "least_per_query": 10_000}
        plan = chunks.chunks(B, 4, S, S, 2, False, window_size, **limits)
        for chunk in plan:
            sizes = chunk.workspace_size(4), 10_000 * chunk.num_rows * chunk.num_queries
            assert max(sizes) * 2 <= chunks.WORKSPACE_MIB * 2**20
        assert sum(chunk.num_rows * chunk.num_queries for chunk in plan) == B * S
        assert all(chunk.num_rows <= 8 for chunk in plan)
        assert all(chunk.num_rows % multiple == 0 for chunk in plan if chunk.rows.stop < B)


@pytest.mark.slow
def test_gradients_are_bit_identical_between_runs():
    case = Case(B=2, T=19, S=19, H=6, is_causal=True)
    first, second = (output_and_gradients(case, "triton", torch.float32) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_hidden_keys_may_contain_nan_and_infinity():
    case = Case(B=2, T=5, S=9, H=4)
    operands, mask = make_operands(case, torch.float32), torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[:, ..., -2:] = False
    expected = run(case, operands, "triton", mask)
    with torch.no_grad():
        operands["k"][:, :, -1] = torch.inf
        operands["k"][:, :, -2] = torch.nan
    assert torch.equal(run(case, operands, "triton", mask), expected)


@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}, {"S": 0}], ids=str)
def test_empty_sizes_equal_the_reference(sizes):
    case = Case(**({"B": 2, "T": 5, "S": 5, "H": 4} | sizes))
    got, expected = output_and_gradients(case, "triton", torch.float32), output_and_gradients(case, "reference")
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], msg=name)


def test_operands_need_not_be_contiguous():
    case = Case(B=2, T=9, S=9, H=4, D=16)
    operands = make_operands(case, torch.float32)
    strided = {n: x.detach().transpose(0, -1).contiguous().transpose(0, -1) for n, x in operands.items()}
    torch.testing.assert_close(run(case, strided, "triton"), run(case, operands, "triton"))


def test_tensors_with_negative_bit_have_their_values():
    case = Case(B=2, T=9, S=9, H=4, D=16, branches="qkgb")
    operands = make_operands(case, torch.float32)
    negated = {n: torch._neg_view((-x).detach()).requires_grad_() for n, x in operands.items()}
    d_out = torch._neg_view(torch.randn(2, 4, 9, 16))
    outs = [run(case, given, "triton") for given in (operands, negated)]
    torch.testing.assert_close(outs[1], outs[0])
    expected, got = (
        torch.autograd.grad(o, list(x.values()), d_out) for o, x in zip(outs, (operands, negated), strict=True)
    )
    torch.testing.assert_close(got, expected)


def test_compiled_autograd():
    case = Case(B=1, T=9, S=9, H=4, D=16, branches="qkgb")
    operands = make_operands(case, torch.float32)
    expected = torch.autograd.grad(run(case, operands, "triton").square().sum(), list(operands.values()))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        run(case, operands, "triton").square().sum().backward()
    for x, right in zip(operands.values(), expected, strict=True):
        torch.testing.assert_close(x.grad, right)


def test_gradients_of_rank_0_do_not_require_gradients():
    q = torch.randn(1, 2, 9, 8, requires_grad=True)
    down, up = (torch.zeros(1, 9, 0, 2, requires_grad=True) for _ in range(2))
    pre = ComposeWeights(SideWeights(down, up, torch.ones(1, 9, 2)))
    grads = torch.autograd.grad(composed_attention(q, q, q, pre, impl="triton").sum(), [down, up])
    assert [grad.shape for grad in grads] == [down.shape] * 2 and not any(grad.requires_grad for grad in grads)


@pytest.mark.parametrize(
    "options", [{}, {"static_base": True, "num_groups": 2}, {"key_wise": False, "rank": 1}], ids=str
)
def test_all_gradients_of_a_layer_equal_the_reference(options):
    torch.manual_seed(0)
    layer = DCAttention(48, 6, impl="reference", **options)
    with torch.no_grad():
        layer.compose.project.mul_(50)
    x = torch.randn(2, 13, 48)

    def gradients(impl: str) -> dict[str, torch.Tensor]:
        layer.impl = impl
        layer.zero_grad()
        layer(x, is_causal=True).square().sum().backward()
        return {name: p.grad.clone() for name, p in layer.named_parameters()}

    expected, got = gradients("reference"), gradients("triton")
    for name in expected:
        assert relative_error(got[name], expected[name]) < 1e-5, name
    assert layer.resolved_impl == "reference"  # set by the first call


@pytest.mark.slow
def test_selective_checkpointing_follows_the_policy():
    """The backward pass repeats the forward of the operator only if the policy does not save its output."""
    case = Case(B=1, T=9, S=9, H=4, D=16, is_causal=True, branches="qkg")
    operands = make_operands(case, torch.float32)
    expected = torch.autograd.grad(run(case, operands, "triton").square().sum(), list(operands.values()))

    def policy(ctx, op, *args, **kwargs):
        is_ours = op == torch.ops.dcmha.triton_attention.default
        return CheckpointPolicy.MUST_SAVE if is_ours and keeps else CheckpointPolicy.PREFER_RECOMPUTE

    for keeps in (True, False):
        calls = CountCalls()
        out = checkpoint(
            lambda operands: run(case, operands, "triton"),
            operands,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, policy),
        )
        with calls:
            got = torch.autograd.grad(out.square().sum(), list(operands.values()))
        assert calls.forward == (0 if keeps else 1)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


class CountCalls(TorchDispatchMode):
    """Dispatch mode that counts the forward calls of the operator."""

    forward = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.forward += func == torch.ops.dcmha.triton_attention.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "how",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.slow),
        pytest.param("dynamic", marks=pytest.mark.long),
        "checkpoint",
    ],
)
def test_compiled_and_checkpointed_gradients_match_eager(how):
    case = Case(B=2, T=9, S=9, H=6, D=16, is_causal=True, branches="qkg")
    operands = make_operands(case, torch.float32)

    def call(operands):
        return run(case, operands, "triton")

    expected = torch.autograd.grad(call(operands).square().sum(), list(operands.values()))
    if how == "checkpoint":
        out = checkpoint(call, operands, use_reentrant=False)
    else:
        backend, dynamic = ("inductor", True) if how == "dynamic" else (how, False)
        out = torch.compile(call, backend=backend, dynamic=dynamic, fullgraph=True)(operands)
    for got, wanted in zip(torch.autograd.grad(out.square().sum(), list(operands.values())), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_gpu_tests_pass_on_the_cpu_with_small_shapes(monkeypatch):
    """Run some tests of `test_gpu.py` on the CPU with a small shape to check the tests themselves."""
    monkeypatch.setattr(test_gpu, "DEVICE", "cpu")
    shape = (2, 7, 7, 3, 1, 8)
    test_gpu.test_as_exact_as_the_reference_in_the_same_dtype(shape, {"is_causal": True}, torch.float32)
    test_gpu.test_few_queries_as_exact_as_the_reference(shape, 2, torch.float32)
    for kind in ("document_ids", "slopes"):
        test_gpu.test_masks_and_dropout(shape, kind, torch.float32)


@pytest.mark.parametrize("is_masked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_operator_passes_opcheck(is_masked):
    torch.manual_seed(0)
    case = Case(B=2, T=7, S=9, H=4, D=16, dropout_p=0.1 if is_masked else 0.0, branches="qkgb")
    operands = make_operands(case, torch.float32)
    pre, post = weights_of(operands, "pre"), ComposeWeights(weights_of(operands, "post").query)
    bias = torch.randn(1, 4, 7, 9, requires_grad=True) if is_masked else None
    documents = document_bounds(torch.zeros(2, 9, dtype=torch.int64)) if is_masked else None
    q, k, v = (operands[name] for name in "qkv")
    call = AttentionCall(q, k, v, pre, post, None, bias, documents, True, None, 0.25, case.dropout_p, 1)
    torch.library.opcheck(attention.forward_op, flatten(call, torch.tensor([5, 7]) if is_masked else None))


def test_autocast_returns_bfloat16_output_and_float32_gradients():
    case = Case(B=1, T=9, S=9, H=4, D=16)
    operands = make_operands(case, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(case, operands, "triton")
    assert out.dtype == torch.bfloat16
    assert relative_error(out.double(), run(case, make_operands(case), "reference")) < 0.03
    out.sum().backward()
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in operands.values())


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (Case(H=65, T=3, S=3), {}, "it supports at most 64 heads per group, got 65 heads in 1 groups"),
    ],
)
def test_unsupported_calls_raise_error(case, options, message):
    operands = make_operands(case, torch.float32)
    with pytest.raises(ValueError, match=f"impl='triton' cannot run: {message}.*; use impl='compiled' or 'reference'"):
        composed_attention(
            *(operands[name] for name in "qkv"),
            weights_of(operands, "pre"),
            num_groups=case.G,
            impl="triton",
            **options,
        )
    with pytest.raises(ValueError, match="it takes float32, bfloat16 and float16, got q in torch.float64"):
        run(Case(), make_operands(Case()), "triton")


def test_key_masks_of_all_ranks_equal_the_reference():
    case = Case(B=2, T=7, S=9, H=4, D=16, mask="keys")
    operands, mask = make_operands(case, torch.float32), make_mask(case)
    expected = run(case, operands, "triton", mask)
    assert (expected[0] == 0).all() and (expected[1] != 0).any()
    shared = mask[1].view(9)
    for spelling in (shared, shared[None], shared[None, None, None]):
        got = run(case, operands, "triton", spelling)
        torch.testing.assert_close(got, run(case, operands, "reference", spelling))

"""The decoding kernels (few queries, many keys) against the float64 reference, in the Triton interpreter."""

import itertools
from dataclasses import replace

import pytest
import torch

from dcmha import composed_attention
from dcmha.impl import chunks
from dcmha.impl.flatten import flat_weights
from dcmha.impl.triton import decode, decode_op
from tests.dcmha.inputs import Case, make_mask, make_operands, relative_error, run, weights_of

SHAPES = [
    {"B": 1, "T": 1, "S": 50, "H": 16},
    {"B": 3, "T": 1, "S": 33, "H": 3, "D": 24},
    {"B": 2, "T": 3, "S": 37, "H": 6, "D": 96},
    {"B": 1, "T": 5, "S": 20, "H": 8, "G": 2, "D": 160},
    {"B": 2, "T": 4, "S": 3, "H": 4},  # if causal, the first query has no visible key
    {"B": 1, "T": 2, "S": 40, "H": 24, "D": 32, "shared": 3},
    {"B": 1, "T": 3, "S": 21, "H": 40, "D": 8},
    {"B": 1, "T": 1, "S": 35, "H": 64, "D": 8, "shared": 8},
    {"B": 1, "T": 6, "S": 6, "H": 5, "D": 8},
]
KINDS = [
    {},
    {"is_causal": True},
    {"is_causal": True, "window_size": 5},
    {"window_size": 4, "mask": "keys"},
    {"mask": "bool"},
    {"mask": "heads", "is_causal": True},
    {"mask": "float-inf", "is_causal": True},
    {"mask": "bias H1S"},
    {"has_documents": True, "is_causal": True},
]
FORMS = [
    {},
    {"compositions": "pre", "R": 1},
    {"compositions": "post", "branches": "qkg"},
    {"branches": "qg", "R": 4},
    {"branches": "b"},
    {"branches": "kg", "R": 3},
    {"branches": "qkg", "R": 0},
]
TIERS = ([], [pytest.mark.long], [pytest.mark.slow], [pytest.mark.long])
CASES = [
    pytest.param(Case(**shape | kind | form), marks=TIERS[number % len(TIERS)])
    for number, ((shape, kind), form) in enumerate(
        zip(itertools.product(SHAPES, KINDS), itertools.cycle(FORMS), strict=False)
    )
    if not ("has_documents" in kind and shape["T"] > shape["S"])
]
CASES.append(pytest.param(Case(B=1, T=8, S=21, H=40, D=8, is_causal=True), marks=pytest.mark.long))


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Record the calls of the decoding kernels."""
    calls, attend = [], decode_op.attend

    def count(*args):
        calls.append(args)
        return attend(*args)

    monkeypatch.setattr(decode_op, "attend", count)
    return calls


@torch.no_grad()
def error(case: Case, dtype: torch.dtype = torch.float32) -> float:
    """Return the relative error of the output."""
    operands, mask = {n: x.detach().to(dtype).double() for n, x in make_operands(case).items()}, make_mask(case)
    expected = run(case, operands, "reference", mask)
    got = run(case, {n: x.to(dtype) for n, x in operands.items()}, "triton", mask)
    return relative_error(got.double(), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_equals_the_reference(case, calls):
    assert error(case) < 2e-6
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[5] | {"is_causal": True}], ids=str)
def test_16_bit_error_is_within_the_rounding_of_the_output(shape, dtype):
    assert error(Case(**shape, branches="qkg"), dtype) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "case",
    [Case(B=3, T=1, S=90, H=6), pytest.param(Case(B=2, T=3, S=90, H=24, D=8, window_size=60), marks=pytest.mark.slow)],
    ids=str,
)
def test_splits_and_chunks_of_rows_preserve_accuracy(case, calls, monkeypatch):
    """Use more splits than the second kernel reads per step, and a workspace for one row of the batch."""
    monkeypatch.setattr(decode, "MAX_SPLITS", 1)
    whole = error(case)
    monkeypatch.setattr(decode, "MAX_SPLITS", 128)
    monkeypatch.setattr(chunks, "WORKSPACE_MIB", 4 * case.H * case.T * 96 / 2**20)
    assert max(error(case), whole) < 2e-6


def test_many_splits_equal_the_reference(calls):
    """Use more than the 16 splits that the second kernel reads at once."""
    assert error(Case(B=1, T=1, S=16 * 19 + 3, H=4, D=8, is_causal=True)) < 2e-6


def test_transposed_cache_is_read_without_a_copy(calls):
    """Keys and values are transposed as in a cache. The kernels receive their memory and strides unchanged."""
    case = Case(B=2, T=1, S=40, H=6, is_causal=True)
    operands = {n: x.detach().float() for n, x in make_operands(case).items()}
    for name in "kv":
        operands[name] = operands[name].transpose(1, 2).contiguous().transpose(1, 2)
    with torch.no_grad():
        run(case, operands, "triton")
    ((_, k, v, pre, post, *_),) = calls
    given = [operands["k"], operands["v"], *weights_of(operands, "pre").key, *weights_of(operands, "post").key]
    for x, y in zip(given, (k, v, *pre.key, *post.key), strict=True):
        assert x.data_ptr() == y.data_ptr() and x.stride() == y.stride()


@torch.no_grad()
@pytest.mark.parametrize("mask", [(1, 0, 0, 1), (0, 0, 1, 1), (1, 0, 1, 0)], ids=str)
@pytest.mark.parametrize("case", [Case(B=2, T=3, S=20, H=6), Case(B=1, T=1, S=20, H=24, D=8)], ids=str)
def test_masks_that_differ_between_heads_equal_the_reference(case, mask):
    """Scores that the mask hides for one head are mixed into other heads before the mask is applied."""
    full = (case.B, case.H, case.T, case.S)
    shape = [1 if same else n for same, n in zip(mask, full, strict=True)]
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.5
    operands = {n: x.detach() for n, x in make_operands(case).items()}
    expected = run(case, operands, "reference", visible)
    got = run(case, {n: x.float() for n, x in operands.items()}, "triton", visible)
    assert relative_error(got.double(), expected) < 2e-6


@torch.no_grad()
def test_keys_hidden_from_all_queries_may_contain_nan():
    """The contents of empty cache slots do not affect the output."""
    case = Case(B=2, T=2, S=40, H=6)
    operands = {n: x.detach().float() for n, x in make_operands(case).items()}
    visible = torch.rand(2, 1, 1, 40) < 0.5
    expected = run(case, operands, "triton", visible)
    for name in ("k", "v"):
        operands[name] = operands[name].masked_fill(~visible.transpose(2, 3), torch.nan)
    for name in ("pre.key.down", "post.key.up"):
        operands[name] = operands[name].masked_fill(~visible[:, 0, 0, :, None, None], torch.nan)
    assert torch.equal(run(case, operands, "triton", visible), expected)


def test_gradients_and_dropout_do_not_use_the_decoding_kernels(calls):
    case = Case(B=1, T=3, S=9, H=4, D=8)
    run(case, {n: x.float() for n, x in make_operands(case).items()}, "triton")
    with torch.no_grad():
        run(replace(case, dropout_p=0.5), {n: x.float() for n, x in make_operands(case).items()}, "triton")
    assert calls == []


@torch.no_grad()
def test_decoding_operator_passes_opcheck_and_compiles():
    case = Case(B=2, T=2, S=9, H=4, D=8)
    operands = {n: x.detach().float() for n, x in make_operands(case).items()}
    pre, post = (weights_of(operands, composition) for composition in ("pre", "post"))
    weights = [*flat_weights(pre), *flat_weights(post)]
    arguments = (*(operands[n] for n in "qkv"), *weights, *(None,) * 5, True, None, 0.3, 0.0, 1)
    torch.library.opcheck(decode_op.decoded, arguments, test_utils=("test_schema", "test_faketensor"))

    def attend(q):
        return composed_attention(q, operands["k"], operands["v"], pre, post, is_causal=True, impl="triton")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(operands["q"]), attend(operands["q"]))


@torch.no_grad()
def test_empty_keys_give_zero_output():
    case = Case(B=2, T=1, S=1, H=4, D=8)
    operands = {n: x.detach().float() for n, x in make_operands(case).items()}
    empty = {n: x if n == "q" or "key" not in n and n not in "kv" else x.narrow(2 if n in "kv" else 1, 0, 0)
             for n, x in operands.items()}  # fmt: skip
    assert torch.equal(run(case, empty, "triton"), torch.zeros(2, 4, 1, 8))

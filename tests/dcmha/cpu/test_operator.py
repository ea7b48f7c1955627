"""The C++ operator against the float64 reference: branches, masks, odd sizes, threads, processes and compilers."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcmha import ComposeWeights, DCAttention, SideWeights, composed_attention
from dcmha.impl.cpu.op import attention
from dcmha.impl.cpu.work_split import share, share_keys

from ..inputs import Case, make_mask, make_operands, output_and_gradients, relative_error, run, tolerance

slow = pytest.mark.slow
ROOT = Path(__file__).parents[3]
SHAPES = [  # odd lengths, heads and channels; several blocks of queries and tiles of keys
    Case(B=1, T=1, S=1, H=1, D=1),
    Case(B=3, T=7, S=19, H=5, D=3),
    Case(B=2, T=70, S=70, H=6, D=20),
    Case(B=1, T=130, S=200, H=3, D=64),
    Case(B=2, T=33, S=16, H=24, D=16),
    Case(B=1, T=1, S=300, H=17, D=24),
]
KINDS = [
    {},
    {"is_causal": True},
    {"is_causal": True, "window_size": 9},
    {"window_size": 5, "mask": "bool"},
    {"mask": "float-inf", "is_causal": True},
    {"mask": "keys"},
]
FORMS = [
    {},
    {"branches": "qkg"},
    {"compositions": "pre", "branches": "qkgb"},
    {"compositions": "post", "branches": "qkg"},
]
MORE_FORMS = [
    {"branches": "qk"},
    {"branches": "qg"},
    {"branches": "kg"},
    {"branches": "b"},
    {"R": 0, "branches": "qkg"},
    {"R": 1, "branches": "q"},
    {"R": 3, "branches": "kb"},
    {"R": 4},
]
GRID = [
    *(replace(SHAPES[i % 6], **kind, **FORMS[i % 4]) for i, kind in enumerate(KINDS * 2)),
    *(
        pytest.param(replace(SHAPES[i % 6], **KINDS[(i + 1) % 6], **form), marks=slow)
        for i, form in enumerate(MORE_FORMS)
    ),
    *(pytest.param(replace(SHAPES[i], H=24, G=G, **KINDS[i]), marks=slow) for i, G in enumerate((2, 3, 4, 6, 8, 24))),
]
LONG = [replace(s, **k, **f) for s in SHAPES for k in KINDS for f in (*FORMS, *MORE_FORMS)]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill uninitialized memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(case: Case) -> None:
    """Compare "cpu" with the float64 reference.

    Where much cancels, the bound is three times the error of the dense reference in float32.
    """
    exact, got = (output_and_gradients(case, impl) for impl in ("reference", "cpu"))
    dense = output_and_gradients(case, "reference", torch.float32)
    for name, value in exact.items():
        allowed = max(tolerance("cpu") * float(value.norm()), 3 * float((dense[name] - value).norm()), 1e-7)
        assert float((got[name] - value).norm()) < allowed, name


@pytest.mark.parametrize("case", GRID, ids=str)
def test_equals_the_reference(case):
    check(case)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG, ids=str)
def test_every_combination_equals_the_reference(case):
    check(case)


@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_few_queries_with_unpacked_keys_equal_the_reference(tokens):
    check(Case(B=2, T=tokens, S=70, H=5, D=20, is_causal=True, window_size=40))


@pytest.mark.parametrize("threads", [3, 8])
@pytest.mark.parametrize(
    "kind", [{}, {"is_causal": True, "window_size": 300}, {"mask": "bool"}, {"mask": "float-inf"}], ids=str
)
@pytest.mark.parametrize("tokens", [1, 30])
def test_keys_split_over_idle_threads_equal_the_reference(threads, tokens, kind):
    """For one block of queries, the sums of each share of the keys affect the weights of all other shares."""
    torch.set_num_threads(threads)
    check(Case(B=1, T=tokens, S=530, H=5, D=20, **kind))


@pytest.mark.parametrize(
    ("rows", "blocks", "keys", "shares"),
    [(1, 1, 530, 4), (2, 1, 530, 2), (3, 1, 530, 1), (1, 1, 300, 2), (1, 2, 530, 1)],
)
def test_share_keys_returns_expected_number_of_shares(rows, blocks, keys, shares):
    torch.set_num_threads(4)
    assert share_keys(rows, blocks, keys).shares == shares


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("low", [-1e6, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("tokens", [3, 20])
def test_rows_with_large_negative_mask_values_match_compiled(tokens, low, threads):
    """Masks of padded queries have such rows. Their weights equal those of the row without a mask, or are uniform."""
    torch.set_num_threads(threads)
    case = Case(B=1, T=tokens, S=512, H=4, D=16)
    mask = torch.zeros(1, 1, tokens, 512)
    mask[:, :, 1] = low
    results = []
    for impl in ("compiled", "cpu"):
        operands = make_operands(case, torch.float32)
        out = run(case, operands, impl, mask)
        results.append([out, *torch.autograd.grad(out[:, :, 1].square().sum(), list(operands.values()))])
    for name, expected, got in zip(("out", *operands), *results, strict=True):
        assert float((got - expected).norm()) <= 1e-3 * float(expected.norm()) + 1e-6, name


def test_compositions_of_different_ranks_equal_the_reference():
    case = Case(T=20, S=20, R=2)
    operands = make_operands(case)
    for name in ("pre.query.down", "pre.query.up", "post.key.down", "post.key.up"):
        operands[name] = operands[name][:, :, :1].detach().requires_grad_()
    del operands["pre.key.gate"], operands["post.query.gate"]
    outs = [run(case, operands, impl) for impl in ("reference", "cpu")]
    gradients = [torch.autograd.grad(out.square().sum(), list(operands.values())) for out in outs]
    for name, a, b in zip(("out", *operands), *((o, *g) for o, g in zip(outs, gradients, strict=True)), strict=True):
        assert relative_error(b, a) < tolerance("cpu"), name


BIASES = [(2, 6, 33, 33), (1, 6, 33, 33), (6, 33, 33), (33, 33), (2, 1, 1, 33), (2, 6, 33, 1), (1, 33), (1,)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_gradients_of_a_bias_equal_the_reference(shape, threads):
    """The bias may be broadcast along any axis, including batch and queries, where threads would add concurrently."""
    case = Case()
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    bias, results = torch.randn(shape, dtype=torch.float64).requires_grad_(), []
    for impl in ("reference", "cpu", "cpu"):
        pairs = bias.expand(2, 6, 33, 33)
        out = run(case, make_operands(case), impl, bias if impl == "cpu" else pairs)
        results.append(
            torch.autograd.grad((out * torch.arange(33.0)[:, None]).sum(), bias if impl == "cpu" else pairs)[0]
        )
    pairs, got, again = results
    summed = pairs.abs().sum_to_size(shape)  # the summed terms may cancel
    assert torch.equal(got, again)
    assert float((got - pairs.sum_to_size(shape)).norm()) < tolerance("cpu") * float(summed.norm())


def test_operands_stored_anywhere_in_memory_give_equal_output():
    """Use views with arbitrary strides and rows at addresses that are not multiples of the vector size."""
    case = Case(T=20, S=20, D=24)
    operands = make_operands(case, torch.float32)
    expected = run(case, operands, "cpu")

    def moved(x: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(x.shape[0], 3, *x.shape[1:-1], x.shape[-1] + 5)
        wide[:, 1, ..., 3:-2] = x.detach()
        return wide[:, 1, ..., 3:-2]

    assert torch.equal(run(case, {name: moved(x) for name, x in operands.items()}, "cpu"), expected)
    spread = {name: x.detach().repeat_interleave(2, -1)[..., ::2] for name, x in operands.items()}
    assert torch.equal(run(case, spread, "cpu"), expected)
    swapped = {name: x.detach().mT.contiguous().mT for name, x in operands.items()}
    assert torch.equal(run(case, swapped, "cpu"), expected)


def test_nan_propagates_as_in_the_reference():
    case = Case(T=9, S=9)
    operands = {name: x.detach() for name, x in make_operands(case, torch.float32).items()}
    for name, value in (("q", torch.nan), ("q", torch.inf), ("v", torch.nan), ("pre.query.gate", torch.nan)):
        spoiled = operands[name].clone()
        spoiled.view(-1)[0] = value
        expected, got = (run(case, operands | {name: spoiled}, impl).isnan() for impl in ("reference", "cpu"))
        assert got.any() and torch.equal(got, expected), name


@pytest.mark.parametrize("case", [Case(B=1, T=200, S=200, is_causal=True), Case(B=3, T=70, S=90)], ids=str)
def test_number_of_threads_changes_only_rounding_and_repeats_are_identical(case):
    results = {}
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        results.setdefault(threads, []).append(output_and_gradients(case, "cpu"))
    one, (two, again) = results[1][0], results[2]
    for name, value in one.items():
        assert torch.equal(two[name], again[name]), name
        assert relative_error(two[name], value) < tolerance("cpu"), name
        assert relative_error(results[3][0][name], value) < tolerance("cpu"), name
    assert torch.equal(one["out"], two["out"])


@pytest.mark.parametrize(
    ("B", "blocks", "threads"), [(1, 1, 8), (1, 64, 2), (3, 4, 2), (64, 4, 2), (5, 0, 4), (0, 3, 2)]
)
@pytest.mark.parametrize("has_sums", [False, True])
def test_share_distributes_the_work_over_all_threads(B, blocks, threads, has_sums):
    torch.set_num_threads(threads)
    split = share(B, blocks, has_sums)
    assert split.threads == threads and 1 <= split.parts <= max(1, blocks) and split.slots == B * split.parts
    assert split.slots >= min(threads, B * blocks)


def attend(operands: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """Return the gradient of the values."""
    case = Case(T=40, S=40)
    operands = operands or make_operands(case, torch.float32)
    return torch.autograd.grad(run(case, operands, "cpu").square().sum(), operands["v"])[0]


IN_A_PROCESS = """
import multiprocessing, sys, torch
from tests.dcmha.inputs import Case, make_operands, run

def attend():
    case = Case(T=40, S=40)
    with torch.no_grad():
        return run(case, make_operands(case, torch.float32), "cpu").double().sum().item()

def put(queue):
    torch.set_num_threads(1)  # as a loader does in its workers
    queue.put(attend())

if __name__ == "__main__":
    torch.set_num_threads(2)
    expected = attend()
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    context.Process(target=put, args=(queue,)).start()
    assert abs(queue.get(timeout=100) - expected) < 1e-3
    assert abs(attend() - expected) < 1e-3
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_operator_runs_in_child_processes(tmp_path, method):
    """Start a process like the workers of a data loader, after threads have run in the parent process."""
    script = tmp_path / "attend.py"
    script.write_text(IN_A_PROCESS)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script, method], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


def test_concurrent_python_threads_give_equal_gradients():
    operands, results = make_operands(Case(T=40, S=40), torch.float32), []
    expected = attend(operands)
    threads = [threading.Thread(target=lambda: results.append(attend(operands))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(relative_error(got, expected) < 1e-6 for got in results)


def arguments(tokens: int = 5, **kind) -> tuple:
    """Return arguments of the registered operator."""
    case = Case(B=1, T=tokens, S=tokens, H=3, D=4, **kind)
    x = make_operands(case, torch.float32)
    weights = [x.get(f"{c}.{n}") for c in ("pre", "post") for n in NAMES]
    bias = torch.randn(1, 3, tokens, tokens, requires_grad=True)
    visible = torch.rand(1, 1, tokens, tokens) > 0.3
    return x["q"], x["k"], x["v"], *weights, bias, visible, None, None, None, True, None, 0.5, 0.0, 1


NAMES = [f"{side}.{field}" for side in ("query", "key") for field in SideWeights._fields] + ["base"]


@pytest.mark.parametrize("kind", [{}, {"branches": "qg", "tokens": 130}], ids=str)
def test_operator_passes_opcheck(kind):
    torch.set_num_threads(2)
    operator, given = attention.forward_op, arguments(**kind)
    torch.library.opcheck(operator, given, test_utils=("test_schema", "test_autograd_registration"))
    torch.use_deterministic_algorithms(False)
    torch.library.opcheck(operator, given, test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=slow)])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_layer_compiles_into_one_graph_and_matches_eager(backend, dynamic):
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    layer, x = DCAttention(32, 4), torch.randn(1, 90, 32, requires_grad=True)
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=dynamic)
    for tokens in (90, 70):
        outs = [f(x[:, :tokens], is_causal=True) for f in (layer, compiled)]
        gradients = [torch.autograd.grad(out.square().sum(), [x, *layer.parameters()]) for out in outs]
        torch.testing.assert_close(outs[1], outs[0])
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_operator_compiles_with_changing_rank():
    case = Case(T=9, S=9)
    compiled = torch.compile(run, backend="eager", fullgraph=True, dynamic=True)
    for rank in (2, 1):
        operands = make_operands(replace(case, R=rank), torch.float32)
        assert torch.equal(compiled(case, operands, "auto"), run(case, operands, "cpu"))


def test_bias_gradient_of_an_empty_batch_is_zero():
    bias = torch.zeros(1, 1, 33, 33, requires_grad=True)
    run(Case(B=0), make_operands(Case(B=0), torch.float32), "cpu", bias).sum().backward()
    assert torch.equal(bias.grad, torch.zeros_like(bias))


def test_partial_gradients_no_grad_and_inference_mode_are_supported():
    case = Case(T=9, S=9)
    operands = {name: x.detach() for name, x in make_operands(case, torch.float32).items()}
    value = operands["v"].requires_grad_()
    got, expected = (torch.autograd.grad(run(case, operands, impl).sum(), value) for impl in ("cpu", "reference"))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert not run(case, operands, "cpu").requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(run(case, operands, "cpu"), run(case, operands, "reference"), rtol=1e-4, atol=1e-5)


def test_single_query_on_a_long_cache_equals_the_last_query_of_a_full_call():
    torch.manual_seed(0)
    B, H, S, D = 2, 4, 90, 16
    q, k, v = torch.randn(3, B, H, S, D).unbind(0)
    weights = [SideWeights(torch.randn(B, S, 2, H), torch.randn(B, S, 2, H), torch.randn(B, S, H)) for _ in range(4)]
    pre, post = ComposeWeights(*weights[:2]), ComposeWeights(*weights[2:])
    whole = composed_attention(q, k, v, pre, post, is_causal=True, window_size=40, impl="cpu")
    last = [w._replace(query=w.query.map(lambda x: x[:, -1:])) for w in (pre, post)]
    one = composed_attention(q[:, :, -1:], k, v, *last, is_causal=True, window_size=40, impl="cpu")
    torch.testing.assert_close(one, whole[:, :, -1:], rtol=1e-5, atol=1e-5)


def test_saved_memory_is_linear_in_the_sequence_length():
    """Autograd saves the operands, the output and one number per row."""
    saved = []
    case = Case(B=1, T=512, S=512, H=4, D=8)
    operands = make_operands(case, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        run(case, operands, "cpu")
    assert max(saved) <= 4 * 8 * 512


def test_boolean_and_floating_masks_give_the_same_output():
    case = Case(mask="bool", T=20, S=33, is_causal=True, window_size=12)
    mask, operands = make_mask(case), make_operands(case)
    hidden = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(run(case, operands, "cpu", mask), run(case, operands, "cpu", hidden))

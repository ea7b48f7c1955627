"""The fused kernels on a GPU at realistic sizes and dtypes: accuracy, determinism, memory and long sequences."""

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dcmha import composed_attention
from dcmha.impl import self_check
from tests.dcmha.inputs import relative_error, weights_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"  # `test_operator.py` sets "cpu" to run some of these tests without a GPU
SHAPES = [  # B, T, S, H, G, D
    (2, 197, 197, 6, 1, 64),
    (2, 256, 256, 12, 1, 32),
    (1, 700, 700, 16, 1, 64),
    (2, 63, 197, 3, 1, 48),
    (1, 1, 300, 16, 1, 128),
    (2, 300, 300, 32, 4, 80),
    (1, 520, 520, 24, 3, 96),
    (1, 2100, 2100, 4, 1, 64),  # few long rows are split between programs; windows are computed in bands
    (1, 1500, 2100, 8, 1, 64),
    (1, 300, 300, 24, 1, 64),
    (2, 200, 200, 32, 1, 80),
    (1, 130, 130, 40, 1, 128),
    (1, 90, 90, 52, 1, 128),
]
KINDS = [{}, {"is_causal": True}, {"is_causal": True, "window_size": 100}, {"window_size": 64}]
SLACK = 8  # rounding of full-size base-2 exponents and log-sums; the reference subtracts the maximum before
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def no_findings():
    """Fail if the self-check replaced wrong kernels during a test."""
    yield
    assert not self_check._findings


def operands(shape, dtype, seed=0) -> dict[str, torch.Tensor]:
    B, T, S, H, G, D = shape
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def rand(*size, scale=1.0):
        return (scale * torch.randn(*size, device=DEVICE, generator=generator)).to(dtype).requires_grad_()

    tensors = {"q": rand(B, H, T, D), "k": rand(B, H, S, D), "v": rand(B, H, S, D)}
    for composition in ("pre", "post"):
        for side, tokens in (("query", T), ("key", S)):
            tensors[f"{composition}.{side}.down"] = rand(B, tokens, 2, H)
            tensors[f"{composition}.{side}.up"] = rand(B, tokens, 2, H, scale=0.3)
            tensors[f"{composition}.{side}.gate"] = rand(B, tokens, H, scale=0.5)
    return tensors


def forward(tensors, impl, num_groups, **options) -> torch.Tensor:
    weights = {name: weights_of(tensors, name) for name in ("pre", "post")}
    options |= {"num_groups": num_groups, "impl": impl}
    return composed_attention(*(tensors[name] for name in "qkv"), **weights, **options)


def gradients(tensors, impl, num_groups, **options) -> dict[str, torch.Tensor]:
    out = forward(tensors, impl, num_groups, **options)
    generator = torch.Generator(DEVICE).manual_seed(9)
    cotangent = torch.randn(out.shape, device=DEVICE, generator=generator).to(out.dtype)
    grads = torch.autograd.grad(out, list(tensors.values()), cotangent)
    return {"out": out.detach()} | dict(zip(tensors, grads, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_exact_as_the_reference_in_the_same_dtype(shape, kind, dtype):
    low = operands(shape, dtype)
    exact = gradients({n: x.detach().double().requires_grad_() for n, x in low.items()}, "reference", shape[4], **kind)
    expected, got = (gradients(low, impl, shape[4], **kind) for impl in ("reference", "triton"))
    for name in exact:
        bound = 2 * relative_error(expected[name].double(), exact[name]) + SLACK * torch.finfo(dtype).eps
        assert relative_error(got[name].double(), exact[name]) < bound, name


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_queries_as_exact_as_the_reference(shape, queries, dtype):
    B, _, S, H, G, D = shape
    low = operands((B, queries, S, H, G, D), dtype)
    visible = torch.rand(B, H, 1, S, device=DEVICE) < 0.8
    exact, expected, got = (
        forward({n: x.to(wanted) for n, x in low.items()}, impl, G, is_causal=True, attn_mask=visible).double()
        for impl, wanted in (("reference", torch.float64), ("reference", dtype), ("triton", dtype))
    )
    bound = 2 * relative_error(expected, exact) + SLACK * torch.finfo(dtype).eps
    assert relative_error(got, exact) < bound


def mask_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, object]:
    """Return the options of a call with a kind of mask. `attn_mask` requires gradients if it is an operand."""
    B, T, S, H, _, _ = shape
    generator = torch.Generator(DEVICE).manual_seed(3)

    def rand(*size):
        return torch.randn(*size, device=DEVICE, generator=generator)

    if kind == "document_ids":
        return {"document_ids": torch.arange(S, device=DEVICE).expand(B, S) // 37, "is_causal": True}
    if kind == "dropout":
        return {"dropout_p": 0.3}
    if kind == "pairs":
        return {"attn_mask": rand(B, 1, T, S) > -1}
    return {"attn_mask": rand(*((1, H, T, S) if kind == "bias" else (H, 1, S))).to(dtype).requires_grad_()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["document_ids", "dropout", "pairs", "bias", "slopes"])
@pytest.mark.parametrize("shape", [(4, 49, 49, 3, 1, 32), (1, 257, 257, 16, 1, 64), (1, 150, 150, 32, 1, 64)], ids=str)
def test_masks_and_dropout(shape, kind, dtype):
    low, found = operands(shape, dtype), {}
    for name, impl, wide in (
        ("exact", "reference", torch.float64),
        ("usual", "reference", dtype),
        ("got", "triton", dtype),
    ):
        tensors = {n: x.detach().to(wide).requires_grad_() for n, x in low.items()}
        options = mask_of(kind, shape, wide)
        mask = options.get("attn_mask")
        if mask is not None and mask.requires_grad:  # use the same values in all dtypes
            options["attn_mask"] = mask_of(kind, shape, dtype)["attn_mask"].detach().to(wide).requires_grad_()
            tensors["attn_mask"] = options["attn_mask"]
        torch.manual_seed(5)  # seed of dropout
        found[name] = gradients(tensors, impl, 1, **options)
    for name, right in found["exact"].items():
        bound = 2 * relative_error(found["usual"][name].double(), right) + SLACK * torch.finfo(dtype).eps
        assert relative_error(found["got"][name].double(), right) < bound, name


@pytest.mark.parametrize("is_causal", [False, True])
def test_shared_keys_equal_repeated_keys(is_causal):
    whole = operands((2, 200, 200, 32, 1, 64), torch.bfloat16)
    shared = {n: x.detach()[:, ::4].clone() if n in ("k", "v") else x.detach() for n, x in whole.items()}
    repeated = {n: x.repeat_interleave(4, 1) if n in ("k", "v") else x for n, x in shared.items()}
    got, expected = (forward(x, "triton", 1, is_causal=is_causal) for x in (shared, repeated))
    torch.testing.assert_close(got, expected)


def test_self_check_on_first_use_passes(monkeypatch):
    monkeypatch.setattr(self_check, "_seen", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for shape in (SHAPES[2], SHAPES[-3]):
            for dtype in (torch.bfloat16, torch.float32):
                gradients(operands(shape, dtype), "triton", 1, is_causal=True)
    assert sorted(kind.kernels for kind in self_check._seen) == ["Gluon"] * 2 + ["Triton"] * 2


def test_self_check_runs_on_first_use_of_a_compiled_call(monkeypatch):
    monkeypatch.setattr(self_check, "_seen", set())
    tensors = operands(SHAPES[0], torch.bfloat16)
    torch.compile(lambda tensors: forward(tensors, "triton", 1).square().sum())(tensors).backward()
    assert len(self_check._seen) == 1 and all(x.grad.isfinite().all() for x in tensors.values())


def test_self_check_runs_on_first_use_in_a_backward_pass(monkeypatch):
    """Reentrant checkpointing runs the self-check of gradients in the autograd thread of the GPU."""
    monkeypatch.setattr(self_check, "_seen", set())
    tensors = operands(SHAPES[0], torch.bfloat16)
    names = list(tensors)
    out = checkpoint(
        lambda *x: forward(dict(zip(names, x, strict=True)), "triton", 1), *tensors.values(), use_reentrant=True
    )
    out.square().sum().backward()
    assert len(self_check._seen) == 2 and all(x.grad.isfinite().all() for x in tensors.values())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_results_are_bit_identical_and_finite_on_nan_filled_memory(kind):
    """Uninitialized memory is filled with NaN."""
    tensors = operands(SHAPES[2], torch.bfloat16)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills memory; the kernels do not need this mode
    try:
        first, second = (gradients(tensors, "triton", 1, **kind) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for name in first:
        assert torch.equal(first[name], second[name]) and first[name].isfinite().all(), name


def peak_mib(T: int, H: int = 16) -> float:
    tensors = operands((1, T, T, H, 1, 64), torch.bfloat16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients(tensors, "triton", 1, is_causal=True)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def test_memory_is_linear_in_the_sequence_length():
    peak_mib(1024)
    assert peak_mib(16384) < 2.2 * peak_mib(8192)


def test_memory_of_a_very_long_sequence_is_below_20000_mib():
    assert peak_mib(65536) < 20000


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_matches_eager(dynamic):
    tensors = operands(SHAPES[0], torch.bfloat16)

    def call(tensors):
        return gradients(tensors, "triton", 1, is_causal=True)["out"]

    compiled = torch.compile(call, dynamic=dynamic)
    torch.testing.assert_close(compiled(tensors), call(tensors))


def test_operator_can_be_captured_in_a_cuda_graph():
    tensors = operands((2, 1, 700, 16, 1, 64), torch.bfloat16)
    with torch.no_grad():
        forward(tensors, "triton", 1, is_causal=True)  # compiles the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward(tensors, "triton", 1, is_causal=True)
        for x in tensors.values():
            x.mul_(0.5)
        graph.replay()
        torch.testing.assert_close(out, forward(tensors, "triton", 1, is_causal=True))


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=str)
def test_training_step_can_be_captured_in_a_cuda_graph(shape):
    tensors = operands(shape, torch.bfloat16)
    cotangent = torch.randn(tensors["q"].shape, device=DEVICE, dtype=torch.bfloat16)

    def step() -> tuple[torch.Tensor, ...]:
        out = forward(tensors, "triton", 1, is_causal=True)
        return out, *torch.autograd.grad(out, list(tensors.values()), cotangent)

    expected = step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # allocates lazy memory such as workspaces of libraries
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)

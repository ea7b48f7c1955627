"""Selection of the implementation of a call, for devices that need not be present."""

import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dcmha import DCAttention, layer, resolve_impl
from dcmha.impl.call import ComposeRanks


def queries(*shape: int, device: str = "cuda", dtype=torch.bfloat16) -> torch.Tensor:
    """Return fake queries without data on a device that need not be present."""
    with FakeTensorMode():
        return torch.empty(*shape, device=device, dtype=dtype)


@pytest.fixture
def capability(monkeypatch):
    """Simulate a GPU of compute capability 9.0, or of the capability that the test sets."""
    value = {"capability": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: value["capability"])
    return value


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(
    ("q", "options", "impl", "reason"),
    [
        (queries(2, 6, 197, 64), {}, "triton", None),
        (queries(2, 32, 100, 64), {"num_groups": 4}, "triton", None),
        (queries(2, 6, 7, 64, dtype=torch.float32), {}, "triton", None),
        (queries(2, 6, 197, 64), {"dropout_p": 0.1}, "triton", None),
        (queries(2, 64, 197, 64), {}, "triton", None),
        (queries(2, 130, 197, 64), {"num_groups": 2}, "compiled", "130 heads in 2 groups"),
        (queries(2, 6, 1, 64), {}, "triton", None),
        (queries(2, 6, 9, 64, dtype=torch.float64), {}, "compiled", "float64"),
        (queries(2, 6, 197, 64, device="cpu"), {}, "cpu", None),
        (queries(2, 6, 1, 64, device="cpu"), {}, "cpu", None),
        (queries(2, 6, 9, 64, device="cpu", dtype=torch.float64), {}, "compiled", "float64"),
        (queries(2, 6, 9, 64, device="cpu"), {"dropout_p": 0.1}, "compiled", "does not support dropout"),
        (
            queries(2, 6, 9, 64, device="cpu"),
            {"ranks": ComposeRanks(4, 5)},
            "compiled",
            "ranks up to 4, got ComposeRanks(query=4, key=5)",
        ),
        (queries(2, 6, 9, 64, device="meta"), {}, "compiled", "'cpu' does not support the call: it needs CPU tensors"),
    ],
    ids=str,
)
def test_auto_selects_expected_implementation(q, options, impl, reason):
    choice = resolve_impl("auto", q, is_composed=True, **options)
    assert choice.impl == impl
    assert choice.reason is None if reason is None else reason in choice.reason
    assert resolve_impl("auto", q, is_composed=False, **options).impl == "sdpa"
    assert resolve_impl("reference", q, is_composed=True, **options).impl == "reference"


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("tokens", [1, 2048])
@pytest.mark.parametrize("heads", [3, 6, 12, 16, 24, 32, 40, 48, 52, 64])
def test_auto_selects_fused_kernels_for_heads_of_named_models(heads, tokens):
    """Use the heads of decoders of 405M to 33B and DCPythia (16 to 52), DCViT (6 to 12) and timm (up to 48: Swin-L)."""
    assert resolve_impl("auto", queries(1, heads, tokens, 64), is_composed=True) == ("triton", None)


def test_old_gpu_falls_back_to_compiled(capability):
    capability["capability"] = (7, 5)
    choice = resolve_impl("auto", queries(2, 6, 197, 64), is_composed=True)
    assert choice.impl == "compiled" and "needs compute capability 8.0, got 7.5" in choice.reason
    with pytest.raises(ValueError, match="impl='triton' cannot run: it needs compute capability 8.0, got 7.5"):
        resolve_impl("triton", queries(2, 6, 197, 64), is_composed=True)


def test_unknown_impl_raises_error():
    with pytest.raises(
        ValueError, match="impl='flash' is unknown; expected 'auto', 'reference', 'compiled', 'cpu', 'triton'"
    ):
        resolve_impl("flash", queries(2, 6, 9, 64), is_composed=True)


def test_impl_cpu_with_cuda_tensors_raises_error():
    with pytest.raises(ValueError, match="impl='cpu' cannot run: it needs CPU tensors, got q on cuda:0; use"):
        resolve_impl("cpu", queries(2, 6, 9, 64), is_composed=True)


def test_auto_selects_cpu_under_compile_and_compiled_under_export():
    """Call `resolve_impl` inside the compiled or exported module."""
    choices = []

    class Ask(torch.nn.Module):
        def forward(self, q):
            choices.append(resolve_impl("auto", q, is_composed=True))
            return q + 1

    q = torch.empty(2, 6, 9, 64)
    torch.compile(Ask(), backend="eager", fullgraph=True)(q)
    torch.export.export(Ask(), (q,), strict=False)
    assert choices == [
        ("cpu", None),
        ("compiled", "'cpu' does not support the call: an exported program must run without its compiled library"),
    ]


def test_old_triton_falls_back_to_compiled(capability, monkeypatch):
    import triton

    monkeypatch.setattr(triton, "__version__", "3.4.0+git")
    choice = resolve_impl("auto", queries(2, 6, 197, 64), is_composed=True)
    assert choice.impl == "compiled" and "it needs Triton 3.5, got 3.4.0+git (a newer torch brings" in choice.reason


def test_fallback_to_compiled_logs_warning(caplog):
    layer._log_choice.cache_clear()
    attention = DCAttention(12, 3, dtype=torch.float64)
    with caplog.at_level(logging.WARNING, "dcmha"):
        attention(torch.zeros(1, 2, 12, dtype=torch.float64))
    (record,) = caplog.records
    assert "impl='auto' runs as 'compiled': 'cpu' does not support the call: it takes float32" in record.message


def test_resolved_impl_is_logged_once_for_equal_layers(caplog):
    layer._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, "dcmha"):
        for _ in range(2):
            DCAttention(32, 4)(torch.randn(1, 5, 32))
    messages = [record.message for record in caplog.records if record.name == "dcmha.layer"]
    assert messages == ["impl='auto' runs as 'cpu'."]

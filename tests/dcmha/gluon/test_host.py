"""Work of the host for a call: few operations, none that waits for the device, so that a CUDA graph can capture it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dcmha import ComposeWeights, SideWeights
from dcmha.impl.gluon import call as call_module
from dcmha.impl.gluon import op, products

ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")


class Operations(TorchDispatchMode):
    """Lists operations of torch that write memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_view = any(returned.alias_info is not None and not returned.alias_info.is_write
                      for returned in function._schema.returns)  # fmt: skip
        if not (is_view or function._schema.name in ALLOCATIONS or function.namespace == "prim"):
            self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch):
    """List launches in place of making them."""
    names = []
    monkeypatch.setattr(products, "accumulate", lambda a, b, scale, out: out.add_(1.0))  # tensors without memory
    monkeypatch.setattr(call_module, "launch", lambda kernel, *rest: names.append(kernel.fn.__name__))
    return names


def solve(B: int = 1, H: int = 16, T: int = 64, D: int = 32, base: bool = False, **options) -> None:
    """Forward and backward on tensors without memory: what needs their values raises."""
    with FakeTensorMode():

        def rand(*shape):
            return torch.empty(*shape, dtype=torch.bfloat16, device="cuda")

        def weights():
            sides = (SideWeights(rand(B, T, 2, H), rand(B, T, 2, H), rand(B, T, H)) for _ in range(2))
            return ComposeWeights(*sides, rand(1, H, H) if base else None)

        options = {"is_causal": True, "window": 0, "scale": 0.25, "dropout_p": 0.0, "num_groups": 1} | options
        flat = [
            part
            for composition in (weights(), weights())
            for part in (*composition.query, *composition.key, composition.base)
        ]
        arguments = (
            rand(B, H, T, D),
            rand(B, H, T, D),
            rand(B, H, T, D),
            *flat,
            None,
            None,
            None,
            None,
            *options.values(),
        )
        operations = Operations()
        with operations:
            out, lse = op.forward(op._attention(*arguments[:3], arguments[3:], mask_gradient=False))
            op.backward(op._attention(*arguments[:3], arguments[3:], mask_gradient=False), out, lse)
        return operations.names


@pytest.mark.parametrize(
    ("short_row", "kernels"),
    [
        (640, ["short_weights", "short_gradients", "key_gradients"]),
        (0, ["composed_weights", "post_gradients", "key_gradients", "pre_gradients"]),
    ],
)
def test_a_call_of_one_chunk_takes_few_operations(launches, monkeypatch, short_row, kernels):
    monkeypatch.setattr(call_module, "SHORT_ROW", short_row)
    assert solve() == ["aten::baddbmm"] * 7
    assert [name for name in launches if name != "pack_weights"] == kernels and launches.count("pack_weights") == 2


@pytest.mark.parametrize("options", [{"T": 2048}, {"window": 200, "T": 2048}, {"base": True, "H": 6, "B": 3}], ids=str)
def test_no_operation_waits_for_the_device(options, launches):
    assert solve(**options) and launches

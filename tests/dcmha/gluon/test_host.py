"""Host work of a call: few operations, and none that waits for the device, so that CUDA graphs can capture the call."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dcmha import ComposeWeights, SideWeights
from dcmha.impl.call import AttentionCall
from dcmha.impl.gluon import call as call_module
from dcmha.impl.gluon import launch, op, packing, products
from dcmha.impl.gluon.indexing import Sizes
from dcmha.impl.packed_gradients import unpack_gradients

ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")


class Operations(TorchDispatchMode):
    """Dispatch mode that records torch operations that write memory."""

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
    """Record kernel launches instead of executing them."""
    names = []

    def note(kernel, grid, *rest):
        names.append(kernel.fn.__name__)
        assert 1 <= grid[0] < 2**31 and all(1 <= n <= 65535 for n in grid[1:])

    monkeypatch.setattr(products, "accumulate", lambda a, b, scale, out: out.add_(1.0))  # tensors have no memory
    monkeypatch.setattr(call_module, "launch", note)
    return names


def solve(
    B: int = 1, H: int = 16, T: int = 64, D: int = 32, S: int | None = None, base: bool = False, **options
) -> None:
    """Run forward and backward on fake tensors, which raise an error if an operation needs their values."""
    with FakeTensorMode():

        def rand(*shape):
            return torch.empty(*shape, dtype=torch.bfloat16, device="cuda")

        def weights():
            sides = (SideWeights(rand(B, n, 2, H), rand(B, n, 2, H), rand(B, n, H)) for n in (T, S or T))
            return ComposeWeights(*sides, rand(1, H, H) if base else None)

        options = {"is_causal": True, "window_size": None, "scale": 0.25, "dropout_p": 0.0, "num_groups": 1} | options
        k = rand(B, H, S or T, D)
        call = AttentionCall(
            *(rand(B, H, T, D), k, k, weights(), weights()), visible=None, bias=None, document_ids=None, **options
        )
        operations = Operations()
        with operations:
            out, lse = op.forward(op.attention_of(call, None))
            op.backward(op.attention_of(call, None, lse), out)
        return operations.names


@pytest.mark.parametrize(
    ("short_row", "kernels"),
    [
        (640, ["short_weights", "short_gradients", "key_gradients"]),
        (0, ["composed_weights", "post_gradients", "key_gradients", "pre_gradients"]),
    ],
)
def test_call_of_one_chunk_runs_few_operations(launches, monkeypatch, short_row, kernels):
    monkeypatch.setattr(call_module, "SHORT_ROW", short_row)
    assert solve() == ["aten::baddbmm"] * 7
    assert [name for name in launches if name != "pack_weights"] == kernels and launches.count("pack_weights") == 2


@pytest.mark.parametrize(
    "options", [{"T": 2048}, {"window_size": 200, "T": 2048}, {"base": True, "H": 6, "B": 3}], ids=str
)
def test_no_operation_waits_for_the_device(options, launches):
    assert solve(**options) and launches


@pytest.mark.parametrize(
    "options",
    [{"B": 70_000, "T": 2}, {"B": 300_000, "H": 1, "T": 1}, {"B": 9, "H": 4, "T": 12_000, "is_causal": False}],
    ids=str,
)
def test_grids_of_large_calls_are_within_cuda_limits(options, launches, monkeypatch):
    monkeypatch.setattr(call_module, "workspace_mib", lambda device: call_module.MAX_MIB)
    assert solve(**options) and launches


def test_too_many_keys_raise_error(launches):
    with pytest.raises(ValueError, match="k has S = 40000000 tokens, too many"):
        solve(H=64, T=1, S=40_000_000)


def test_arguments_from_the_caller_are_compiled_for_any_address_and_stride():
    x = torch.zeros(4, 4, dtype=torch.bfloat16)
    side = launch._representative(packing.side_of(SideWeights(x[None], x[None], None)))
    assert side.down.data_ptr() % 16 == 2 and side.gate is None and side.up_row >= 2**31
    sizes = launch._representative(Sizes(*range(16, 27)))
    assert sizes.num_keys % 16 == 0 and sizes.T % 2 == 1 and max(sizes) < 2**31
    assert launch._representative((x,))[0] is x  # tensors that the operator allocates are aligned


def test_mask_of_another_dtype_raises_error():
    q = torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16)
    call = AttentionCall(q, q, q, None, None, None, torch.zeros(1, 1, 3, 3), None, True, None, 1.0, 0.0, 1)
    with pytest.raises(ValueError, match="mask has dtype torch.float32; expected torch.bool, or the dtype of q"):
        op.attention_of(call, None)


def test_gradients_of_rank_0_are_empty():
    down, gate = torch.zeros(1, 3, 0, 2), torch.ones(1, 3, 2)
    packed = torch.ones(1, 3, 1, 2)
    pre = ComposeWeights(SideWeights(down, down, gate), SideWeights(down, down))
    q = torch.zeros(1, 2, 3, 8)
    call = AttentionCall(q, q, q, pre, None, None, None, None, True, None, 1.0, 0.0, 1)
    grads = unpack_gradients([*[q] * 3, packed], call)[3:9]
    assert [None if x is None else x.shape for x in grads] == [
        down.shape,
        down.shape,
        gate.shape,
        *[down.shape] * 2,
        None,
    ]

"""Launching kernels with low overhead: compiled once per kind of call, then launched directly with raw arguments."""

from typing import Any

import torch
from torch import Tensor

from .indexing import KernelConfig
from .packing import STRIDES

ALIGNED = ("first_key", "num_keys")  # sizes that are always multiples of 16
# tensors of the caller, which may be aligned to their elements only; all others are allocated by the operator
UNALIGNED = ("down", "up", "gate", "base", "pairs", "starts", "stops", "seed")
INT64 = ("row", "head", "query", "key", *STRIDES)  # strides of the caller\'s tensors
REPRESENTATIVE, MULTIPLE, LARGE = 3, 32, 2**40 + 1  # representatives of any number, multiples of 16, 64-bit numbers

REGISTERS = {  # maximum per thread, by blocks of 16 heads
    "composed_weights": {1: 128, 2: 128},
    "post_gradients": {1: 128},
    "pre_gradients": {1: 128},
    "short_weights": {1: 128},
    "short_gradients": {1: 168},
}
_compiled: dict[tuple, Any] = {}


def launch(kernel, grid: tuple[int, int, int], arguments: tuple, constants: tuple, device: object) -> None:
    """Launch a kernel.

    Args:
        kernel: The kernel.
        grid: Programs along three axes.
        arguments: Its non-constant arguments: tensors, numbers, None, and tuples of them.
        constants: The constants, which follow them.
        device: Device of the launch.
    """
    missing = tuple(argument is None for argument in arguments)  # types follow from this and the constants
    key = (kernel.fn.__name__, missing, constants, device)
    compiled = _compiled.get(key)
    if compiled is None:
        options = options_of(kernel.fn.__name__, constants[0])
        compiled = kernel.warmup(*map(_representative, arguments), *constants, grid=(1,), **options)
        _compiled[key] = compiled
    compiled[grid](*arguments, *constants)


def options_of(name: str, kind: KernelConfig) -> dict[str, int]:
    """Return the compile options of a kernel.

    Register limits allow more concurrent programs; the values are predicted to be the fastest on an H100.
    """
    registers = REGISTERS.get(name, {}).get(kind.BLOCKS)
    return {"num_warps": 1} | ({} if registers is None else {"maxnreg": registers})


def _representative(value: object, name: str = "") -> object:
    """Replace a value by a representative, so that a kernel is not recompiled for other lengths and addresses."""
    if isinstance(value, tuple):
        names = getattr(value, "_fields", [name] * len(value))
        parts = [_representative(part, part_name) for part, part_name in zip(value, names, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, Tensor) and name in UNALIGNED:
        return torch.empty(2, dtype=value.dtype)[1:]
    if isinstance(value, int):
        return MULTIPLE if name in ALIGNED else LARGE if name in INT64 else REPRESENTATIVE
    return value

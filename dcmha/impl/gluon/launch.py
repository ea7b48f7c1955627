"""Launching kernels with little work on the host: compiled once for a kind of call, then called with bare arguments."""

from typing import Any

from .indexing import KernelConfig

ALIGNED = ("first_key", "num_keys")  # sizes that are multiples of 16
REPRESENTATIVE, MULTIPLE = 3, 32  # numbers that stand for any, and for any multiple of 16

REGISTERS = {  # most of a thread, by the blocks of 16 heads
    "composed_weights": {1: 128, 2: 168},
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
        arguments: Its arguments but for the constants: tensors, numbers, None, and tuples of them.
        constants: The constants, which come after them.
        device: Where it runs.
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
    """Return the options that a kernel is compiled with.

    Caps on registers let more programs run at once; they are those that the timing model predicts to be fastest on an
    H100.
    """
    registers = REGISTERS.get(name, {}).get(kind.BLOCKS)
    return {"num_warps": 1} | ({} if registers is None else {"maxnreg": registers})


def _representative(value: object, name: str = "") -> object:
    """Replace numbers by others that stand for all, so that no kernel is compiled anew for another length."""
    if isinstance(value, tuple):
        names = getattr(value, "_fields", [name] * len(value))
        parts = [_representative(part, part_name) for part, part_name in zip(value, names, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, int):
        return MULTIPLE if name in ALIGNED else REPRESENTATIVE
    return value

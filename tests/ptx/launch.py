"""Launches of Gluon kernels, compiled for a GPU that need not be present and executed on CPU tensors.

TRITON_INTERPRET must not be set when Triton is imported.
"""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from dcmha.impl.gluon import call
from dcmha.impl.gluon.launch import ALIGNED, INT64, UNALIGNED, options_of

from .execute import run
from .memory import LANES

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
SCRATCH = (None, None)  # parameters added by Triton, unused here: memory for the compiler and for a profiler
Types = str | tuple["Types", ...]


def execute(
    kernel: JITFunction, grid: tuple[int, int, int], arguments: tuple, constants: tuple, capability: int = 90
) -> None:
    """Execute a kernel like `dcmha.impl.gluon.launch.launch`, with the checks of `run`.

    Args:
        kernel: Kernel to execute.
        grid: Number of programs along three axes.
        arguments: All arguments except the constants: CPU tensors, numbers, None, and tuples of them.
        constants: Constants, which follow the arguments.
        capability: Compute capability of the target GPU: 80 or 90. Later GPUs have other instructions.
    """
    values = [value for _, value, _ in _leaves("", arguments) if value is not None]
    run(compile_kernel(kernel, _types(arguments), constants, capability), grid, [*values, *SCRATCH])


def install(patch: pytest.MonkeyPatch, capability: int = 90) -> None:
    """Replace the launches of composed attention with `execute`."""
    patch.setattr(call, "launch", lambda *arguments: execute(*arguments[:4], capability))


@cache
def compile_kernel(kernel: JITFunction, types: tuple[Types, ...], constants: tuple, capability: int) -> str:
    """Compile a kernel to PTX, for addresses and sizes that are multiples of 16 as in `dcmha.impl.gluon.launch`."""
    names = kernel.arg_names
    leaves = [(name or names[place[0]], type, place) for name, type, place in _leaves("", types)]
    constexprs = {place: None for _, type, place in leaves if type == "constexpr"}
    constexprs |= {(len(types) + n,): constant for n, constant in enumerate(constants)}
    aligned = [place for name, type, place in leaves if is_aligned(name, type)]
    signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
    source = GluonASTSource(kernel, signature, constexprs, {place: [["tt.divisibility", 16]] for place in aligned})
    options = options_of(kernel.fn.__name__, constants[0])
    return compile(source, target=GPUTarget("cuda", capability, LANES), options=options).asm["ptx"]


def is_aligned(name: str, type: str) -> bool:
    """Return whether an argument is an address or a size that is a multiple of 16."""
    return name in ALIGNED or (type.startswith("*") and name not in UNALIGNED)


def _types(value: object, name: str = "") -> Types:
    """Return Triton's names of the types of arguments."""
    if isinstance(value, tuple):
        names = getattr(value, "_fields", [name] * len(value))
        types = [_types(*part) for part in zip(value, names, strict=True)]
        return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, int):
        return "i64" if name in INT64 else "i32"
    return {float: "fp32", type(None): "constexpr"}[type(value)]


def _leaves(name: str, value: object, place: tuple[int, ...] = ()) -> Iterator[tuple[str, object, tuple[int, ...]]]:
    """Yield name, value and position of each part of nested tuples. Parts of plain tuples have the tuple's name."""
    if not isinstance(value, tuple):
        yield name, value, place
        return
    for n, (part, each) in enumerate(zip(getattr(value, "_fields", [name] * len(value)), value, strict=True)):
        yield from _leaves(part, each, (*place, n))

"""Programs at one place of a kernel, and their registers."""

from functools import cache, cached_property

import numpy as np

from .errors import PTXError
from .floats import Array
from .memory import LANES
from .operations import DTYPES
from .parse import Instruction


class Warps:
    """Programs that have the same instruction to execute next.

    Attributes:
        programs: Their numbers [programs].
        registers: Values [programs, 32] of registers and parameters, each of the dtype that it was computed in.
    """

    def __init__(self, programs: Array, registers: dict[str, Array]) -> None:
        self.programs, self.registers = programs, registers

    @cached_property
    def threads(self) -> Array:
        """Numbers of the threads [programs, 32] within the launch."""
        return self.programs[:, None] * LANES + np.arange(LANES)

    def read(self, operand: str, dtype: np.dtype) -> Array:
        """Return a register, parameter or number, [programs, 32]."""
        if operand in self.registers:
            return cast(self.registers[operand], dtype)
        return np.broadcast_to(constant(operand, dtype), self.threads.shape)

    def write(self, register: str, value: Array, instruction: Instruction) -> None:
        """Write a register where the instruction's predicate is true."""
        if instruction.predicate is not None:
            value = np.where(self.condition(instruction), value, self.read(register, value.dtype))
        self.registers[register] = value

    def condition(self, instruction: Instruction) -> Array:
        """Tell where an instruction's predicate is true, [programs, 32]."""
        if instruction.predicate is None:
            return np.ones(self.threads.shape, bool)
        return self.read(instruction.predicate, DTYPES["pred"]) ^ instruction.negated

    def select(self, chosen: Array) -> "Warps":
        """Return the programs that are chosen [programs]."""
        if chosen.all():
            return self
        return Warps(self.programs[chosen], {name: value[chosen] for name, value in self.registers.items()})


def join(parts: list[Warps]) -> Warps:
    """Join programs that came to the same place on different ways; registers that only some wrote are left out."""
    if len(parts) == 1:
        return parts[0]
    registers = {}
    for name in set.intersection(*(set(part.registers) for part in parts)):
        values = [part.registers[name] for part in parts]
        widest = max((value.dtype for value in values), key=lambda dtype: dtype.itemsize)
        registers[name] = np.concatenate([cast(value, widest) for value in values])
    return Warps(np.concatenate([part.programs for part in parts]), registers)


def cast(value: Array, dtype: np.dtype) -> Array:
    """Take the bits of a value as another type: of a narrower one the lower bits, for a wider one extended."""
    if value.dtype == dtype:
        return value
    if value.dtype.itemsize != dtype.itemsize:
        kind = "i" if value.dtype.kind == "i" else "u"
        value = value.view(f"{kind}{value.dtype.itemsize}").astype(f"{kind}{dtype.itemsize}")
    return value.view(dtype)


@cache
def constant(text: str, dtype: np.dtype) -> Array:
    """Read a number: decimal, hexadecimal, with or without U behind it, or the bits of a float32 (0f3F800000)."""
    if text.startswith("%"):
        raise PTXError(f"{text} was never written")
    bits = int(text[2:], 16) if text[:2].lower() == "0f" else int(text.removesuffix("U"), 0)
    return np.array(bits != 0) if dtype.kind == "b" else cast(np.array(bits % 2**64, np.uint64), dtype)

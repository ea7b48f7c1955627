"""Programs at the same instruction of a kernel, and their registers."""

from functools import cache, cached_property

import numpy as np

from .errors import PTXError
from .floats import Array
from .memory import LANES
from .operations import DTYPES
from .parse import Instruction


class Warps:
    """Programs with the same next instruction.

    Attributes:
        programs: Program numbers [programs].
        registers: Values [programs, 32] of registers and parameters, each in the dtype in which it was computed.
    """

    def __init__(self, programs: Array, registers: dict[str, Array]) -> None:
        self.programs, self.registers = programs, registers

    @cached_property
    def threads(self) -> Array:
        """Thread numbers [programs, 32] within the launch."""
        return self.programs[:, None] * LANES + np.arange(LANES)

    def read(self, operand: str, dtype: np.dtype) -> Array:
        """Return the value of a register, parameter or number, [programs, 32]."""
        if operand in self.registers:
            return cast(self.registers[operand], dtype)
        return np.broadcast_to(constant(operand, dtype), self.threads.shape)

    def write(self, register: str, value: Array, instruction: Instruction) -> None:
        """Write a register where the predicate of the instruction is true."""
        if instruction.predicate is not None:
            value = np.where(self.condition(instruction), value, self.read(register, value.dtype))
        self.registers[register] = value

    def condition(self, instruction: Instruction) -> Array:
        """Return where the predicate of an instruction is true, [programs, 32]."""
        if instruction.predicate is None:
            return np.ones(self.threads.shape, bool)
        return self.read(instruction.predicate, DTYPES["pred"]) ^ instruction.negated

    def select(self, chosen: Array) -> "Warps":
        """Return the programs selected by a boolean array [programs]."""
        if chosen.all():
            return self
        return Warps(self.programs[chosen], {name: value[chosen] for name, value in self.registers.items()})


def join(parts: list[Warps]) -> Warps:
    """Join programs that reached the same instruction on different paths. Drop registers that only some wrote."""
    if len(parts) == 1:
        return parts[0]
    registers = {}
    for name in set.intersection(*(set(part.registers) for part in parts)):
        values = [part.registers[name] for part in parts]
        widest = max((value.dtype for value in values), key=lambda dtype: dtype.itemsize)
        registers[name] = np.concatenate([cast(value, widest) for value in values])
    return Warps(np.concatenate([part.programs for part in parts]), registers)


def cast(value: Array, dtype: np.dtype) -> Array:
    """Reinterpret the bits of a value as another type. Truncate to a narrower type; extend to a wider one."""
    if value.dtype == dtype:
        return value
    if value.dtype.itemsize != dtype.itemsize:
        kind = "i" if value.dtype.kind == "i" else "u"
        value = value.view(f"{kind}{value.dtype.itemsize}").astype(f"{kind}{dtype.itemsize}")
    return value.view(dtype)


@cache
def constant(text: str, dtype: np.dtype) -> Array:
    """Parse a number: decimal or hexadecimal, with or without the suffix U, or the bits of a float32 (0f3F800000)."""
    if text.startswith("%"):
        raise PTXError(f"{text} was never written")
    bits = int(text[2:], 16) if text[:2].lower() == "0f" else int(text.removesuffix("U"), 0)
    return np.array(bits != 0) if dtype.kind == "b" else cast(np.array(bits % 2**64, np.uint64), dtype)

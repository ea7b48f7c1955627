"""Programs at one place of a kernel, and their registers."""

from functools import cache, cached_property

import numpy as np

from .errors import UninitialisedError
from .floats import Array
from .memory import LANES
from .operations import DTYPES
from .parse import Instruction


class Warps:
    """Programs that have the same instruction to execute next.

    Attributes:
        programs: Their numbers [programs].
        registers: Values by names of registers and parameters: [programs or 1, 32 or 1], where 1 stands for a value that
            all have. A value keeps the dtype that it was computed in.
    """

    def __init__(self, programs: Array, registers: dict[str, Array]) -> None:
        self.programs, self.registers = programs, registers

    @property
    def shape(self) -> tuple[int, int]:
        """Programs and lanes."""
        return len(self.programs), LANES

    @cached_property
    def threads(self) -> Array:
        """Numbers of the threads [programs times 32] within the launch."""
        return (self.programs[:, None] * LANES + np.arange(LANES)).ravel()

    def read(self, operand: str, dtype: np.dtype) -> Array:
        """Return a register, parameter or number."""
        if operand not in self.registers:
            return constant(operand, dtype)
        return cast(self.registers[operand], dtype)

    def write(self, register: str, value: Array, instruction: Instruction) -> None:
        """Write a register where the instruction's predicate is true."""
        if instruction.predicate is not None:
            value = np.where(self.condition(instruction), value, self.read(register, value.dtype))
        self.registers[register] = value

    def condition(self, instruction: Instruction) -> Array:
        """Tell where an instruction's predicate is true."""
        condition = self.read(instruction.predicate, DTYPES["pred"])
        return ~condition if instruction.negated else condition

    def lanes(self, instruction: Instruction) -> Array | slice:
        """Return which of all threads execute an instruction."""
        if instruction.predicate is None:
            return slice(None)
        return np.flatnonzero(np.broadcast_to(self.condition(instruction), self.shape))

    def whole(self, operand: str, dtype: np.dtype) -> Array:
        """Return an operand of all threads [programs, 32]."""
        return np.broadcast_to(self.read(operand, dtype), self.shape)

    def select(self, chosen: Array, live: set[str]) -> "Warps":
        """Return the programs that are chosen [programs], with the registers that they still need."""
        kept = {name: self.registers[name] for name in live if name in self.registers}
        rows = {name: value[chosen] if len(value) > 1 else value for name, value in kept.items()}
        return Warps(self.programs[chosen], rows)


def join(parts: list[Warps]) -> Warps:
    """Join programs that came to the same place on different ways."""
    if len(parts) == 1:
        return parts[0]
    names = set.intersection(*(set(part.registers) for part in parts))
    return Warps(np.concatenate([part.programs for part in parts]), {name: _join(name, parts) for name in names})


def _join(name: str, parts: list[Warps]) -> Array:
    values = [part.registers[name] for part in parts]
    if all(value is values[0] for value in values):
        return values[0]
    dtype = max((value.dtype for value in values), key=lambda dtype: dtype.itemsize)
    lanes = max(value.shape[1] for value in values)
    shapes = [(len(part.programs), lanes) for part in parts]
    whole = [np.broadcast_to(cast(value, dtype), shape) for value, shape in zip(values, shapes, strict=True)]
    return np.concatenate(whole)


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
    """Read a number [1, 1]: decimal, hexadecimal, or the bits of a float32 (0f3F800000)."""
    if text.startswith("%"):
        raise UninitialisedError(f"{text} was never written")
    bits = int(text[2:], 16) if text[:2].lower() == "0f" else int(text, 0)
    if dtype == DTYPES["pred"]:
        return np.array([[bits != 0]])
    return cast(np.array([[bits % 2**64]], np.uint64), dtype)

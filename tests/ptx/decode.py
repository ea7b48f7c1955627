"""Decoder of instructions into functions of the programs that execute them."""

import re
from collections.abc import Callable, Sequence

import numpy as np

from . import floats
from .errors import PTXError
from .memory import LANES, Memory
from .operations import DTYPES, FORMATS, OPERATIONS, PACK, Operation
from .parse import Address, Instruction
from .warps import Warps

Step = Callable[[Warps, Memory], None]

ACCESS = re.compile(r"(ld|st)\.global(?:\.v[24])?\.([bus](?:8|16|32|64)|f32)")
PRODUCT = re.compile(r"mma\.sync\.aligned\.m16n8k(?:8|16)\.row\.col\.f32\.(b?f16)\.\1\.f32")
SYNCHRONISING = re.compile(r"bar|fence|membar|mbarrier|\w+\.shared|ldmatrix|stmatrix|cp\.async")


def decode(instruction: Instruction) -> Step:
    """Return the function that executes an instruction."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "mov.b32" and isinstance(operands[0], tuple):
        return _unpack(instruction)
    if opcode == "mov.b32" and isinstance(operands[1], tuple):
        return _compute(instruction, operands[1], PACK)
    if opcode in OPERATIONS:
        return _compute(instruction, operands[1:], OPERATIONS[opcode])
    if access := ACCESS.fullmatch(opcode):
        return (_load if access[1] == "ld" else _store)(instruction, DTYPES[access[2]])
    if opcode == "shfl.sync.bfly.b32" and operands[3:] == ("31", "-1"):
        return _shuffle(instruction)
    if product := PRODUCT.fullmatch(opcode):
        return _multiply(instruction, FORMATS[product[1]])
    reason = "shared memory and barriers are not supported" if SYNCHRONISING.match(opcode) else "unknown instruction"
    raise PTXError(f"{reason}: {instruction.text}")


def _compute(instruction: Instruction, sources: Sequence[str], operation: Operation) -> Step:
    typed = [(source, DTYPES[type]) for source, type in zip(sources, operation.types, strict=True)]

    def step(warps: Warps, memory: Memory) -> None:
        value = operation.compute(*(warps.read(*source) for source in typed))
        warps.write(instruction.operands[0], value, instruction)

    return step


def _unpack(instruction: Instruction) -> Step:
    registers, source = instruction.operands

    def step(warps: Warps, memory: Memory) -> None:
        for register, value in zip(registers, floats.unpack(warps.read(source, DTYPES["b32"])), strict=True):
            warps.write(register, value, instruction)

    return step


def _load(instruction: Instruction, dtype: np.dtype) -> Step:
    registers, address = instruction.operands

    def step(warps: Warps, memory: Memory) -> None:
        active = warps.condition(instruction)
        data = np.zeros((*active.shape, len(registers) * dtype.itemsize), np.uint8)
        data[active] = memory.load(_addresses(warps, address)[active], data.shape[2], warps.threads[active])
        for register, value in zip(registers, np.moveaxis(data.view(dtype), 2, 0), strict=True):
            warps.write(register, np.ascontiguousarray(value), instruction)

    return step


def _store(instruction: Instruction, dtype: np.dtype) -> Step:
    address, registers = instruction.operands

    def step(warps: Warps, memory: Memory) -> None:
        active = warps.condition(instruction)
        data = np.stack([warps.read(register, dtype)[active] for register in registers], 1)
        memory.store(_addresses(warps, address)[active], data.view(np.uint8), warps.threads[active])

    return step


def _addresses(warps: Warps, address: Address) -> np.ndarray:
    return warps.read(address.register, DTYPES["s64"]) + address.offset


def _shuffle(instruction: Instruction) -> Step:
    """Exchange values between pairs of lanes."""
    destination, source, mask = instruction.operands[:3]
    partners = np.arange(LANES) ^ int(mask, 0)

    def step(warps: Warps, memory: Memory) -> None:
        warps.write(destination, warps.read(source, DTYPES["b32"])[:, partners], instruction)

    return step


def _multiply(instruction: Instruction, format: floats.Format) -> Step:
    registers, *fragments = instruction.operands
    typed = list(zip(fragments, (DTYPES["b32"], DTYPES["b32"], DTYPES["f32"]), strict=True))

    def step(warps: Warps, memory: Memory) -> None:
        a, b, c = ([warps.read(register, dtype) for register in fragment] for fragment, dtype in typed)
        for register, value in zip(registers, floats.matrix_product(a, b, c, format), strict=True):
            warps.write(register, value, instruction)

    return step

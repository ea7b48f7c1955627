"""Instructions as functions of the programs that execute them."""

import re
from collections.abc import Callable

import numpy as np

from . import floats
from .errors import UnsupportedError
from .memory import LANES, Memory
from .operations import DTYPES, FORMATS, OPERATIONS
from .parse import Address, Instruction
from .warps import Warps

Step = Callable[[Warps, Memory], None]

ACCESS = re.compile(r"(ld|st)\.global(?:\.v([24]))?\.([bus](?:8|16|32|64)|f32)")
PRODUCT = re.compile(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32")
ORDERING = re.compile(r"bar\.|barrier|.*\.shared|ldmatrix|stmatrix|fence|membar|mbarrier|cp\.async")


def decode(instruction: Instruction) -> Step:
    """Return what an instruction does."""
    opcode, operands = instruction.opcode, instruction.operands
    if re.fullmatch(r"mov\.b(32|64)", opcode) and any(isinstance(operand, tuple) for operand in operands):
        return _unpack(instruction) if isinstance(operands[0], tuple) else _pack(instruction)
    if opcode in OPERATIONS:
        return _compute(instruction)
    if access := ACCESS.fullmatch(opcode):
        size = DTYPES[access[3]].itemsize
        return _load(instruction, access[3]) if access[1] == "ld" else _store(instruction, access[3])
    if opcode == "shfl.sync.bfly.b32" and operands[3:] == ("31", "-1"):
        return _shuffle(instruction)
    if product := PRODUCT.fullmatch(opcode):
        return _multiply(instruction, FORMATS[product[1]])
    if ORDERING.match(opcode):
        raise UnsupportedError(f"{instruction.text}: shared memory and barriers are unsupported: programs are one warp")
    raise UnsupportedError(f"{instruction.text}: unknown instruction")


def _compute(instruction: Instruction) -> Step:
    destination, *sources = instruction.operands
    compute, types = OPERATIONS[instruction.opcode]
    typed = [(source, DTYPES[type]) for source, type in zip(sources, types, strict=True)]

    def step(warps: Warps, memory: Memory) -> None:
        warps.write(destination, compute(*(warps.read(*source) for source in typed)), instruction)

    return step


def _pack(instruction: Instruction) -> Step:
    """mov.b32 r, {low, high}."""
    destination, parts = instruction.operands
    part, whole = _halves(instruction)

    def step(warps: Warps, memory: Memory) -> None:
        low, high = (warps.read(register, part).astype(whole) for register in parts)
        warps.write(destination, low | (high << (8 * part.itemsize)), instruction)

    return step


def _unpack(instruction: Instruction) -> Step:
    """mov.b32 {low, high}, r."""
    (low, high), source = instruction.operands
    part, whole = _halves(instruction)

    def step(warps: Warps, memory: Memory) -> None:
        value = warps.read(source, whole)
        warps.write(low, value.astype(part), instruction)
        warps.write(high, (value >> (8 * part.itemsize)).astype(part), instruction)

    return step


def _halves(instruction: Instruction) -> tuple[np.dtype, np.dtype]:
    whole = DTYPES[instruction.opcode.removeprefix("mov.")]
    return np.dtype(f"u{whole.itemsize // 2}"), whole


def _load(instruction: Instruction, type: str) -> Step:
    registers, address = instruction.operands
    dtype = DTYPES[type]

    def step(warps: Warps, memory: Memory) -> None:
        lanes = warps.lanes(instruction)
        place = _addresses(warps, address)[lanes]
        data = np.zeros((warps.programs.size * LANES, len(registers) * dtype.itemsize), np.uint8)
        if len(place) > 0:
            data[lanes] = memory.load(place, data.shape[1], warps.threads[lanes])
        for register, value in zip(registers, np.ascontiguousarray(data.view(dtype).T), strict=True):
            warps.write(register, value.reshape(warps.shape), instruction)

    return step


def _store(instruction: Instruction, type: str) -> Step:
    address, registers = instruction.operands
    dtype = DTYPES[type]

    def step(warps: Warps, memory: Memory) -> None:
        lanes = warps.lanes(instruction)
        place = _addresses(warps, address)[lanes]
        if len(place) > 0:
            data = np.stack([warps.whole(register, dtype).ravel()[lanes] for register in registers], 1)
            memory.store(place, data.view(np.uint8), warps.threads[lanes])

    return step


def _addresses(warps: Warps, address: Address) -> np.ndarray:
    """Return the addresses of all threads [programs times 32]."""
    return warps.whole(address.register, DTYPES["s64"]).ravel() + address.offset


def _shuffle(instruction: Instruction) -> Step:
    destination, source, distance = instruction.operands[:3]
    partners = np.arange(LANES) ^ int(distance, 0)

    def step(warps: Warps, memory: Memory) -> None:
        warps.write(destination, warps.whole(source, DTYPES["b32"])[:, partners], instruction)

    return step


def _multiply(instruction: Instruction, format: floats.Format) -> Step:
    destinations, *fragments = instruction.operands
    types = (DTYPES["b32"], DTYPES["b32"], DTYPES["f32"])

    def step(warps: Warps, memory: Memory) -> None:
        a, b, c = (
            [warps.whole(register, dtype) for register in fragment]
            for fragment, dtype in zip(fragments, types, strict=True)
        )
        for register, value in zip(destinations, floats.matrix_product(a, b, c, format), strict=True):
            warps.write(register, value, instruction)

    return step

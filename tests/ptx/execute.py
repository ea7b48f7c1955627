"""Execution of PTX on CPU tensors: batches of programs, each as far as it comes together with others.

Programs of a batch that have the same instruction next execute it at once. Branches split them; the programs at the
first block go on, and the others wait, so that they come together again after a loop or a condition.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from .dataflow import live_registers, stored_parameters
from .decode import Step, decode
from .errors import DivergenceError, PTXError
from .floats import Array
from .memory import LANES, Memory, describe
from .operations import DTYPES
from .parse import Block, Instruction, Kernel, parse
from .warps import Warps, join

BATCH = 128  # programs


class Executable(NamedTuple):
    """A kernel made ready.

    Attributes:
        kernel: Its blocks.
        steps: What the instructions of each block do.
        live: Registers and parameters that each block needs.
        written: Parameters that stores may go to.
    """

    kernel: Kernel
    steps: list[list[tuple[Instruction, Step]]]
    live: list[set[str]]
    written: set[str]


def run(ptx: str, grid: tuple[int, int, int], arguments: Sequence[Tensor | int | float | None]) -> None:
    """Execute a kernel.

    Every access is checked: bounds, alignment, and races between programs and between lanes, which nothing orders.

    Args:
        ptx: A module of one kernel of one warp, without shared memory.
        grid: Programs along three axes.
        arguments: One of each parameter: tensors on the CPU, which the kernel writes to, numbers, None for a null pointer.
    """
    executable = prepare(ptx)
    named = dict(zip(executable.kernel.parameters, arguments, strict=True))
    memory = Memory({name: value for name, value in named.items() if isinstance(value, Tensor)}, executable.written)
    parameters = {
        name: _parameter(memory.address(name) if isinstance(value, Tensor) else value, executable.kernel.parameters[name])
        for name, value in named.items()
    }
    count = grid[0] * grid[1] * grid[2]
    with np.errstate(all="ignore"):
        for start in range(0, count, BATCH):
            programs = np.arange(start, min(start + BATCH, count))
            _run_batch(executable, Warps(programs, parameters | _special_registers(programs, grid)), memory)


@cache
def prepare(ptx: str) -> Executable:
    """Parse and decode a kernel."""
    kernel = parse(ptx)
    steps = [[(instruction, decode(instruction)) for instruction in block.instructions] for block in kernel.blocks]
    return Executable(kernel, steps, live_registers(kernel.blocks), stored_parameters(kernel))


def _parameter(value: float | None, type: str) -> Array:
    dtype = DTYPES[type]
    if isinstance(value, float):
        return np.full((1, 1), value, np.float32)
    signed = np.full((1, 1), value or 0, f"i{dtype.itemsize}")
    return signed.view(dtype)


def _special_registers(programs: Array, grid: tuple[int, int, int]) -> dict[str, Array]:
    column = programs[:, None]
    places = (column % grid[0], column // grid[0] % grid[1], column // (grid[0] * grid[1]))
    numbers = {f"%ctaid.{axis}": place.astype(np.uint32) for axis, place in zip("xyz", places, strict=True)}
    return numbers | {"%tid.x": np.arange(LANES, dtype=np.uint32)[None]}


def _run_batch(executable: Executable, warps: Warps, memory: Memory) -> None:
    waiting = {0: [warps]}  # parts of the batch, by the block that they execute next
    while waiting:
        number = min(waiting)
        warps, block = join(waiting.pop(number)), executable.kernel.blocks[number]
        for instruction, step in executable.steps[number]:
            try:
                step(warps, memory)
            except PTXError as error:
                raise _located(error, executable.kernel, instruction) from None
        taken = _taken(executable.kernel, block, warps)
        for target, chosen in ((block.taken, taken), (block.following, ~taken)):
            if target is not None and chosen.any():
                waiting.setdefault(target, []).append(warps.select(chosen, executable.live[target]))


def _taken(kernel: Kernel, block: Block, warps: Warps) -> Array:
    """Tell which programs take a block's branch [programs]."""
    if block.branch is None or block.branch.predicate is None:
        return np.full(len(warps.programs), block.branch is not None)
    condition = np.broadcast_to(warps.condition(block.branch), warps.shape)
    diverging = condition.any(1) & ~condition.all(1)
    if diverging.any():
        thread = int(warps.programs[diverging][0]) * LANES + int(condition[diverging][0].argmin())
        error = DivergenceError(f"{describe(thread)} branches differently from other lanes")
        raise _located(error, kernel, block.branch)
    return condition[:, 0]


def _located(error: PTXError, kernel: Kernel, instruction: Instruction) -> PTXError:
    return type(error)(f"{kernel.name}: {error}: {instruction.text} ({instruction.source})")

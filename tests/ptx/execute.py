"""Execution of PTX on CPU tensors in batches of programs.

Programs of a batch with the same next block execute it together. A branch divides them: the programs at the first block
continue and the others wait, so that they are joined again after a loop or a condition.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from torch import Tensor

from .decode import Step, decode
from .errors import PTXError
from .floats import Array
from .memory import LANES, Memory, describe
from .operations import DTYPES
from .parse import BasicBlock, Kernel, parse
from .warps import Warps, join

BATCH = 128  # programs per batch
Steps = list[list[tuple[Step, str]]]  # per block, functions with the texts of their instructions


def run(ptx: str, grid: tuple[int, int, int], arguments: Sequence[Tensor | int | float | None]) -> None:
    """Execute a kernel.

    Every access is checked for its bounds, its alignment, and races between programs and lanes, which are not ordered.

    Args:
        ptx: Module with one kernel of one warp without shared memory.
        grid: Number of programs along three axes.
        arguments: One argument per parameter: a CPU tensor, which stores modify, a number, or None for a null pointer.

    Raises:
        PTXError: At the first invalid access or for an unsupported instruction.
    """
    kernel, steps = prepare(ptx)
    given = dict(zip(kernel.parameters, arguments, strict=True))
    memory = Memory({name: value for name, value in given.items() if isinstance(value, Tensor)})
    given |= memory.addresses
    parameters = {name: _parameter(given[name], DTYPES[type]) for name, type in kernel.parameters.items()}
    count = math.prod(grid)
    for start in range(0, count, BATCH):
        programs = np.arange(start, min(start + BATCH, count))
        registers = parameters | _special_registers(programs, grid)
        whole = {name: np.broadcast_to(value, (len(programs), LANES)) for name, value in registers.items()}
        try:
            with np.errstate(all="ignore"):
                _run_batch(kernel.blocks, steps, Warps(programs, whole), memory)
        except PTXError as error:
            raise PTXError(f"{kernel.name}: {error}") from None


@cache
def prepare(ptx: str) -> tuple[Kernel, Steps]:
    """Parse and decode a kernel."""
    kernel = parse(ptx)
    try:
        return kernel, [[(decode(each), each.text) for each in block.instructions] for block in kernel.blocks]
    except PTXError as error:
        raise PTXError(f"{kernel.name}: {error}") from None


def _parameter(value: float | None, dtype: np.dtype) -> Array:
    if isinstance(value, float):
        return np.array(value, np.float32)
    return np.array(value or 0, f"i{dtype.itemsize}")


def _special_registers(programs: Array, grid: tuple[int, int, int]) -> dict[str, Array]:
    z, y, x = (place.astype(np.uint32)[:, None] for place in np.unravel_index(programs, grid[::-1]))
    sizes = {f"%nctaid.{axis}": np.array(size, np.uint32) for axis, size in zip("xyz", grid, strict=True)}
    lanes = np.arange(LANES, dtype=np.uint32)
    return sizes | {"%ctaid.x": x, "%ctaid.y": y, "%ctaid.z": z, "%tid.x": lanes}


def _run_batch(blocks: list[BasicBlock], steps: Steps, warps: Warps, memory: Memory) -> None:
    waiting = {0: [warps]}  # parts of the batch by the number of their next block
    while waiting:
        number = min(waiting)
        warps, block = join(waiting.pop(number)), blocks[number]
        for step, text in steps[number]:
            try:
                step(warps, memory)
            except PTXError as error:
                raise PTXError(f"{error}: {text}") from None
        taken = _taken(block, warps)
        for target, chosen in ((block.taken, taken), (block.following, ~taken)):
            if target is not None and chosen.any():
                waiting.setdefault(target, []).append(warps.select(chosen))


def _taken(block: BasicBlock, warps: Warps) -> Array:
    """Return which programs take the branch of a block, [programs]."""
    if block.branch is None:
        return np.zeros(len(warps.programs), bool)
    condition = warps.condition(block.branch)
    diverging = condition != condition[:, :1]
    if diverging.any():
        thread = describe(warps.threads[diverging][0])
        raise PTXError(f"divergence: {thread} branches differently from lane 0: {block.branch.text}")
    return condition[:, 0]

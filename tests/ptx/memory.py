"""Global memory: the tensors that a kernel was passed, with checks of every access.

Tensors lie at made-up addresses, far apart, so that no access strays from one into another unnoticed: an address is the
number of an argument, from 1, times 2^40, plus the byte within the tensor's storage. Storages begin at multiples of
2^40, as allocations do at multiples of 512 bytes on GPUs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .errors import MisalignedError, OutOfBoundsError, RaceError
from .floats import Array

LANES = 32  # of a program: one warp
SPACING = 40  # bits of a byte's number within a storage
SEVERAL = -1  # threads have read a cell


class Storage:
    """Bytes of a storage, and who accessed them.

    A cell is an element of the smallest dtype that tensors of the storage have.

    Attributes:
        data: All bytes, uint8.
        cell: Bytes of a cell.
        writer: Of each cell, 1 + the thread that wrote last, 0 for none; None if the kernel has no stores to the storage.
        reader: Of each cell, 1 + the thread that read, 0 for none, `SEVERAL`.
    """

    def __init__(self, tensors: list[Tensor], is_written: bool) -> None:
        self.data = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage()).numpy()
        self.cell = min(tensor.element_size() for tensor in tensors)
        cells = len(self.data) // self.cell
        self.writer, self.reader = (np.zeros(cells, np.int32) if is_written else None for _ in range(2))

    def load(self, first: Array, length: int, threads: Array) -> Array:
        """Load bytes [accesses, length]; `first` byte of each [accesses], a multiple of `length`."""
        if self.writer is not None:
            cells, owner = self._cells(first, length), threads[:, None] + 1
            self._check(self.writer, cells, owner, "reads", "wrote")
            known = self.reader[cells]
            reader = np.where((known == 0) | (known == owner), owner, SEVERAL)
            self.reader[cells] = reader
            self.reader[cells[self.reader[cells] != reader]] = SEVERAL
        return self._rows(length)[first // length]

    def store(self, first: Array, data: Array, threads: Array) -> None:
        """Store bytes [accesses, length], likewise."""
        length = data.shape[1]
        rows, place = self._rows(length), first // length
        cells, owner = self._cells(first, length), threads[:, None] + 1
        self._check(self.reader, cells, owner, "writes", "read")
        self._check(self.writer, cells, owner, "writes", "wrote", self._differ(rows[place], data))
        rows[place] = data
        self.writer[cells] = owner
        self._check(self.writer, cells, owner, "writes", "wrote", self._differ(rows[place], data))

    def _rows(self, length: int) -> Array:
        return self.data[: len(self.data) // length * length].reshape(-1, length)

    def _cells(self, first: Array, length: int) -> Array:
        return first[:, None] // self.cell + np.arange(length // self.cell)

    def _differ(self, before: Array, after: Array) -> Array:
        """Tell which cells [accesses, cells of one] differ."""
        return (before != after).reshape(len(before), -1, self.cell).any(2)

    def _check(
        self, known: Array, cells: Array, owner: Array, now: str, before: str, matters: Array | None = None
    ) -> None:
        """Raise if another thread accessed a cell before; a lane of the same program may, where it does not matter."""
        other = known[cells]
        bad = (other != 0) & (other != owner)
        if matters is not None:
            bad &= matters | ((other - 1) // LANES != (owner - 1) // LANES)
        if bad.any():
            access, cell = np.argwhere(bad)[0]
            thread, other = int(owner[access, 0]) - 1, int(other[access, cell]) - 1
            who = "several threads" if other < 0 else describe(other)
            raise RaceError(f"{describe(thread)} {now} byte {cells[access, cell] * self.cell}, which {who} {before}")


class Argument(NamedTuple):
    """A tensor that was passed: name of the parameter, its storage, and its first byte and the byte after its last."""

    name: str
    storage: Storage
    start: int
    stop: int


class Memory:
    """The tensors of a launch.

    Args:
        tensors: Tensors by names of parameters.
        written: Parameters that stores may go to.
    """

    def __init__(self, tensors: dict[str, Tensor], written: set[str]) -> None:
        names: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            names.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
        self.arguments: dict[str, Argument] = {}
        for group in names.values():
            storage = Storage([tensors[name] for name in group], not written.isdisjoint(group))
            self.arguments |= {name: Argument(name, storage, *_span(tensors[name])) for name in group}
        self.numbered = [self.arguments[name] for name in tensors]

    def address(self, name: str) -> int:
        """Return the address of a tensor's first element."""
        argument = self.arguments[name]
        return (self.numbered.index(argument) + 1 << SPACING) + argument.start

    def load(self, address: Array, length: int, threads: Array) -> Array:
        """Load bytes [accesses, length] from addresses [accesses], for threads [accesses]."""
        data = np.empty((len(address), length), np.uint8)
        for argument, chosen, first in self._accesses(address, length, threads):
            data[chosen] = argument.storage.load(first, length, threads[chosen])
        return data

    def store(self, address: Array, data: Array, threads: Array) -> None:
        """Store bytes [accesses, length], likewise."""
        for argument, chosen, first in self._accesses(address, data.shape[1], threads):
            argument.storage.store(first, data[chosen], threads[chosen])

    def _accesses(self, address: Array, length: int, threads: Array) -> Iterator[tuple[Argument, Array | slice, Array]]:
        """Check accesses, and yield those to each argument: which of all they are, and their first bytes."""
        numbers = address >> SPACING
        all_same = (numbers == numbers[0]).all()
        for number in numbers[:1] if all_same else np.unique(numbers):
            chosen = slice(None) if all_same else np.flatnonzero(numbers == number)
            first = address[chosen] - (number << SPACING)
            if not 0 < number <= len(self.numbered):
                raise OutOfBoundsError(f"{describe(threads[chosen][0])} accesses {address[chosen][0]:#x}, no tensor")
            argument = self.numbered[number - 1]
            outside = (first < argument.start) | (first + length > argument.stop)
            for bad, error in ((outside, OutOfBoundsError), (first % length != 0, MisalignedError)):
                if bad.any():
                    at = np.argmax(bad)
                    place = f"{length} bytes at byte {first[at]} of a storage for {argument.name}"
                    extent = f"which is bytes {argument.start} to {argument.stop}"
                    raise error(f"{describe(threads[chosen][at])} accesses {place}, {extent}")
            yield argument, chosen, first


def describe(thread: int) -> str:
    """Name a thread."""
    return f"program {thread // LANES}, lane {thread % LANES}"


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after its last."""
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    if tensor.numel() == 0:
        return start, start
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size

"""Global memory: the tensors passed to a kernel, with checks of every access.

The tensors have artificial addresses that are far apart, so that every access beyond a tensor is detected. An address
is the number of the tensor, counted from 1, times 2^40, plus the byte offset within its storage. Storages are therefore
aligned as on GPUs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .errors import PTXError
from .floats import Array

LANES = 32  # per program: one warp
SPACING = 40  # bits of the byte offset within a storage
SEVERAL = -1  # value of `reader` for a byte that several programs have read


class Storage:
    """Bytes of a storage and the threads that accessed them.

    Attributes:
        data: Bytes of the storage.
        writer: For each byte, 1 + the last thread that wrote it, or 0 for none.
        reader: For each byte, 1 + the program that read it, 0 for none, or `SEVERAL`.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.data = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
        self.writer, self.reader = (np.zeros(len(self.data), np.int32) for _ in range(2))

    def load(self, places: Array, threads: Array) -> Array:
        """Load bytes at offsets `places` [accesses, bytes per access] for threads [accesses, 1]."""
        _check("reads", self.writer[places], threads)
        before, program = self.reader[places], threads // LANES + 1
        reader = np.where((before == 0) | (before == program), program, SEVERAL)
        self.reader[places] = reader
        self.reader[places[self.reader[places] != reader]] = SEVERAL
        return self.data[places]

    def store(self, places: Array, data: Array, threads: Array) -> None:
        """Store bytes in the same form. Lanes of one program may store the same value to the same byte.

        They may also overwrite a byte that another lane read in an earlier instruction, because lanes that do not
        diverge preserve this order.
        """
        reader = self.reader[places]
        races = (reader != 0) & (reader != threads // LANES + 1)
        if races.any():
            raise PTXError(f"race: {describe(threads[np.argwhere(races)[0][0], 0])} writes what another program read")
        _check("writes", self.writer[places], threads, self.data[places] != data)
        self.data[places], self.writer[places] = data, threads + 1
        _check("writes", self.writer[places], threads, self.data[places] != data)


def _check(verb: str, before: Array, threads: Array, differ: bool | Array = True) -> None:
    """Raise an error if another thread wrote a byte before. Within a program, raise only if the values differ."""
    is_other_program = (before - 1) // LANES != threads // LANES
    races = (before != 0) & (before != threads + 1) & (is_other_program | differ)
    if races.any():
        access, byte = np.argwhere(races)[0]
        raise PTXError(f"race: {describe(threads[access, 0])} {verb} what {describe(before[access, byte] - 1)} wrote")


class Argument(NamedTuple):
    """Tensor argument: name of the parameter, storage, first byte, and the byte after the last."""

    name: str
    storage: Storage
    start: int
    stop: int


class Memory:
    """Tensors of a launch by parameter name.

    Attributes:
        addresses: Address of the first element of each tensor.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): Storage(tensor) for tensor in tensors.values()}
        self._arguments, self.addresses = [], {}
        for number, (name, tensor) in enumerate(tensors.items(), 1):
            start = tensor.storage_offset() * tensor.element_size()
            stop = start + _extent(tensor) * tensor.element_size()
            self._arguments.append(Argument(name, storages[tensor.untyped_storage().data_ptr()], start, stop))
            self.addresses[name] = (number << SPACING) + start

    def load(self, addresses: Array, length: int, threads: Array) -> Array:
        """Load bytes [accesses, length] from addresses [accesses] for threads [accesses]."""
        data = np.empty((len(addresses), length), np.uint8)
        for storage, chosen, places in self._accesses(addresses, length, threads):
            data[chosen] = storage.load(places, threads[chosen, None])
        return data

    def store(self, addresses: Array, data: Array, threads: Array) -> None:
        """Store bytes [accesses, length] in the same form."""
        for storage, chosen, places in self._accesses(addresses, data.shape[1], threads):
            storage.store(places, data[chosen], threads[chosen, None])

    def _accesses(self, addresses: Array, length: int, threads: Array) -> Iterator[tuple[Storage, Array, Array]]:
        """Check accesses. Yield for each tensor its storage, access indices and byte offsets [accesses, length]."""
        numbers = addresses >> SPACING
        for number in np.unique(numbers):
            chosen = np.flatnonzero(numbers == number)
            first = addresses[chosen] - (number << SPACING)
            if not 0 < number <= len(self._arguments):
                raise PTXError(f"out of bounds: {describe(threads[chosen[0]])} accesses no tensor")
            name, storage, start, stop = self._arguments[number - 1]
            outside = (first < start) | (first + length > stop)
            for bad, problem in ((outside, "out of bounds"), (first % length != 0, "misaligned")):
                if bad.any():
                    access = f"{length} bytes at {first[bad][0]} of {name}, bytes {start} to {stop} of a storage"
                    raise PTXError(f"{problem}: {describe(threads[chosen][bad][0])} accesses {access}")
            yield storage, chosen, first[:, None] + np.arange(length)


def describe(thread: int) -> str:
    """Return the program and the lane of a thread as text."""
    return f"program {thread // LANES}, lane {thread % LANES}"


def _extent(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last within the storage."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))

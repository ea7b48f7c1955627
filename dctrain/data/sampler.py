"""Deterministic sampling: the order of an epoch is a function of (seed, epoch), of which each rank takes a slice.

Training: all ranks have the same number of batches; the last samples of an epoch, fewer than one global batch, are
dropped (different ones in each epoch). Evaluation: every sample once, over all ranks. An order is never stored in
memory: any part of it is computed on demand.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

SHARD_WINDOW = 64  # samples are shuffled within this many shards, so that reading is nearly sequential
ROUNDS = 8
ORDER = 2  # version of the order, recorded in checkpoints


class SampleRef(NamedTuple):
    """Reference to a sample for a worker: its index, the epoch (for augmentation), and whether it is padding."""

    index: int
    epoch: int
    is_padding: bool = False


class Position(NamedTuple):
    """Position in training: the epoch, and the number of its samples that all ranks together have consumed."""

    epoch: int
    consumed: int


START = Position(0, 0)


class Permutation:
    """A permutation of 0, ..., n - 1 with random access.

    A Feistel network permutes the integers with as many bits as n needs, or one more; results of n or more are passed
    through it again.

    Args:
        n: Number of elements.
        key: Selects the permutation.
    """

    def __init__(self, n: int, key: Sequence[int]) -> None:
        self.n = n
        self.half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
        self.mask = np.uint64((1 << int(self.half)) - 1)
        self.keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return the elements at some positions, int64."""
        numbers = self._network(places.astype(np.uint64))
        while (beyond := numbers >= self.n).any():
            numbers[beyond] = self._network(numbers[beyond])
        return numbers.astype(np.int64)

    def _network(self, numbers: np.ndarray) -> np.ndarray:
        left, right = numbers >> self.half, numbers & self.mask
        for key in self.keys:
            left, right = right, left ^ (_hashed(right ^ key) & self.mask)
        return (left << self.half) | right


def _hashed(x: np.ndarray) -> np.ndarray:
    """Mix 64 bits with the finalizer of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class EpochOrder:
    """The order of an epoch: shards shuffled, then samples within windows of shards.

    Args:
        shard_sizes: Samples of each shard; a single shard is fully shuffled.
        seed: Seed of the run.
        epoch: Index of the epoch.
        window: Number of shards shuffled together.
    """

    def __init__(self, shard_sizes: Sequence[int], seed: int, epoch: int, window: int = SHARD_WINDOW) -> None:
        sizes = np.asarray(shard_sizes, dtype=np.int64)
        shards = Permutation(len(sizes), [seed, epoch])(np.arange(len(sizes)))
        self.firsts = (np.cumsum(sizes) - sizes)[shards]  # by position in the order: the first sample of the shard
        self.ends = np.cumsum(sizes[shards])  # and the end of the shard in the order
        self.key, self.window = (seed, epoch), window

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        """Compute a slice of the order: indices of samples, int64."""
        start, stop, _ = part.indices(len(self))
        found = [np.empty(0, np.int64)]
        while start < stop:
            number = int(np.searchsorted(self.ends, start, side="right")) // self.window
            first, ends = self._bounds(number)
            end = min(stop, int(ends[-1]))
            within = Permutation(int(ends[-1]) - first, [*self.key, number + 1])(np.arange(start, end) - first) + first
            shards = np.searchsorted(ends, within, side="right")
            begins = np.concatenate([[first], ends[:-1]])
            found.append(self.firsts[number * self.window :][shards] + within - begins[shards])
            start = end
        return np.concatenate(found)

    def _bounds(self, number: int) -> tuple[int, np.ndarray]:
        """Return the start of a window in the order, and the ends of its shards before shuffling."""
        begin = number * self.window
        return int(self.ends[begin - 1]) if begin else 0, self.ends[begin : begin + self.window]


class Progress:
    """Maps the number of batches trained so far to a position in the data.

    Args:
        num_samples: Samples per epoch.
        global_batch: Samples per step over all ranks.
        start: Position of batch `first_batch`; later positions follow from it.
        first_batch: Number of batches trained before `start`.
        limit: Maximum batches per epoch (the trainer's `limit_train_batches`); the rest of the order is skipped.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch: int,
        start: Position = START,
        first_batch: int = 0,
        limit: int | None = None,
    ) -> None:
        self.num_samples, self.global_batch = num_samples, global_batch
        self.start, self.first_batch = start, first_batch
        self.steps_per_epoch = num_samples // global_batch
        self.usable = num_samples
        if limit is not None and limit < self.steps_per_epoch:
            self.steps_per_epoch, self.usable = limit, limit * global_batch
        self.remaining = max(0, self.usable - start.consumed) // global_batch

    def position(self, num_batches: int) -> Position:
        """Return the position of batch `num_batches`, counted from 0 over the whole training."""
        step = num_batches - self.first_batch
        if step < self.remaining:
            return Position(self.start.epoch, self.start.consumed + step * self.global_batch)
        epochs, step = divmod(step - self.remaining, self.steps_per_epoch)
        return Position(self.start.epoch + 1 + epochs, step * self.global_batch)


class TrainBatches(Sampler[list[SampleRef]]):
    """One rank's batches from the current position to the end of the epoch. Iterating twice gives the same batches.

    Args:
        shard_sizes: Samples of each shard.
        batch_size: Samples per rank and step.
        rank: Rank of this process.
        world_size: Number of processes.
        seed: Seed of the run.
        progress: Maps batch indices to positions.
        num_trained: Returns the number of batches trained so far; called at the start of each iteration.
    """

    def __init__(
        self, shard_sizes: Sequence[int], batch_size: int, rank: int, world_size: int, seed: int, progress, num_trained
    ) -> None:
        self.shard_sizes, self.batch_size, self.rank, self.world_size = shard_sizes, batch_size, rank, world_size
        self.seed, self.progress, self.num_trained = seed, progress, num_trained

    def __len__(self) -> int:
        return self.progress.num_samples // self.progress.global_batch  # the trainer applies its limit to this

    def __iter__(self) -> Iterator[list[SampleRef]]:
        epoch, consumed = self.progress.position(self.num_trained())
        order = EpochOrder(self.shard_sizes, self.seed, epoch)
        global_batch = self.batch_size * self.world_size
        for start in range(consumed, self.progress.usable - global_batch + 1, global_batch):
            mine = start + self.rank * self.batch_size
            yield [SampleRef(int(i), epoch) for i in order[mine : mine + self.batch_size]]


class EvalBatches(Sampler[list[SampleRef]]):
    """One rank's share of the samples, in order. All ranks get the same number; surplus ones are marked as padding.

    Args:
        num_samples: Number of samples.
        batch_size: Samples per rank and step.
        rank: Rank of this process.
        world_size: Number of processes.
        mixed: Permutation whose first samples are taken; None for the order of the data set.
    """

    def __init__(
        self, num_samples: int, batch_size: int, rank: int, world_size: int, mixed: Permutation | None = None
    ) -> None:
        share = -(-num_samples // world_size)
        self.num_samples, self.batch_size, self.mixed = num_samples, batch_size, mixed
        self.mine = range(rank, share * world_size, world_size)

    def __len__(self) -> int:
        return -(-len(self.mine) // self.batch_size)

    def __iter__(self) -> Iterator[list[SampleRef]]:
        last = self.num_samples - 1
        for start in range(0, len(self.mine), self.batch_size):
            places = np.array(self.mine[start : start + self.batch_size])
            indices = np.minimum(places, last)
            indices = indices if self.mixed is None else self.mixed(indices)
            yield [SampleRef(int(i), 0, bool(place > last)) for i, place in zip(indices, places, strict=True)]

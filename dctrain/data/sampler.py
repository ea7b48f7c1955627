"""Which sample comes when: the order of an epoch is a function of (seed, epoch) alone, a rank takes its slice of it.

Training: every rank takes as many batches as every other; the last samples of an epoch, fewer than one global batch,
are left out (others each epoch). Evaluation: every sample once, over all ranks. No order is ever held in memory: any
part of it is computed when it is wanted, whatever the number of samples.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

SHARD_WINDOW = 64  # samples are shuffled within this many shards, so that reading stays near-sequential
ROUNDS = 8
ORDER = 2  # which function of (seed, epoch) this is; checkpoints tell theirs


class SampleRef(NamedTuple):
    """What a worker needs to make a sample: its index, the epoch (for augmentation), and whether it counts."""

    index: int
    epoch: int
    is_padding: bool = False


class Position(NamedTuple):
    """A place in training: the pass over the data, and how many of its samples all ranks have taken together."""

    epoch: int
    consumed: int


START = Position(0, 0)


class Permutation:
    """A permutation of 0, ..., n - 1 of which any part is computed by itself.

    A Feistel network permutes the numbers of as many bits as n needs, or one more; what falls beyond n goes through it
    again until it does not.

    Args:
        n: How many numbers.
        key: Chooses the permutation.
    """

    def __init__(self, n: int, key: Sequence[int]) -> None:
        self.n = n
        self.half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
        self.mask = np.uint64((1 << int(self.half)) - 1)
        self.keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Tell what stands at some places, int64."""
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
    """Mix 64 bits: the finaliser of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class EpochOrder:
    """The order of an epoch: shards shuffled, then samples within windows of shards.

    Args:
        shard_sizes: Samples of each shard; one entry shuffles everything with everything.
        seed: Seed of the run.
        epoch: Number of the pass.
        window: Shards shuffled together.
    """

    def __init__(self, shard_sizes: Sequence[int], seed: int, epoch: int, window: int = SHARD_WINDOW) -> None:
        sizes = np.asarray(shard_sizes, dtype=np.int64)
        shards = Permutation(len(sizes), [seed, epoch])(np.arange(len(sizes)))
        self.firsts = (np.cumsum(sizes) - sizes)[shards]  # by place in the order: the first sample of the shard there
        self.ends = np.cumsum(sizes[shards])  # and the place behind its window's share of the order
        self.key, self.window = (seed, epoch), window

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        """Compute a part of the order: indices of samples, int64."""
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
        """Tell where a window begins in the order, and where each of its shards would end if they were not mixed."""
        begin = number * self.window
        return int(self.ends[begin - 1]) if begin else 0, self.ends[begin : begin + self.window]


class Progress:
    """Turns the number of batches trained so far into a position in the data.

    Args:
        num_samples: Samples of one pass.
        global_batch: Samples that all ranks take together in one step.
        start: Where batch number `first_batch` began; later ones follow from it.
        first_batch: Batches trained before `start`.
        limit: Most batches of a pass (the trainer's `limit_train_batches`); later ones of its order are left out.
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
        """Tell where batch number `num_batches` (from 0, of the whole training) begins."""
        step = num_batches - self.first_batch
        if step < self.remaining:
            return Position(self.start.epoch, self.start.consumed + step * self.global_batch)
        epochs, step = divmod(step - self.remaining, self.steps_per_epoch)
        return Position(self.start.epoch + 1 + epochs, step * self.global_batch)


class TrainBatches(Sampler[list[SampleRef]]):
    """One rank's batches from the current position to the end of the pass. Iterating twice gives the same batches.

    Args:
        shard_sizes: Samples of each shard.
        batch_size: Samples of this rank in a step.
        rank: This process.
        world_size: Number of processes.
        seed: Seed of the run.
        progress: Maps batch numbers to positions.
        num_trained: Called at each iteration: how many batches have been trained so far.
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
    """One rank's share of samples, in order. Ranks get equally many; the surplus ones are marked as padding.

    Args:
        num_samples: How many samples.
        batch_size: Samples of this rank in a step.
        rank: This process.
        world_size: Number of processes.
        mixed: Puts the set into another order, of which the first samples are taken; None leaves its own.
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

"""Which sample comes when: the order of an epoch is a function of (seed, epoch) alone, a rank takes its slice of it.

Training: every rank takes as many batches as every other; the last samples of an epoch, fewer than one global batch,
are left out (others each epoch). Evaluation: every sample once, over all ranks.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

SHARD_WINDOW = 64  # samples are shuffled within this many shards, so that reading stays near-sequential


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


def shuffled_order(shard_sizes: Sequence[int], seed: int, epoch: int, window: int = SHARD_WINDOW) -> np.ndarray:
    """Shuffle the shards, then the samples within windows of shards.

    Args:
        shard_sizes: Samples of each shard; one entry shuffles everything with everything.
        seed: Seed of the run.
        epoch: Number of the pass.
        window: Shards shuffled together.

    Returns:
        A permutation of all sample indices, int64.
    """
    rng = np.random.default_rng([seed, epoch])
    starts = np.concatenate([[0], np.cumsum(shard_sizes)])
    shards = rng.permutation(len(shard_sizes))
    parts = []
    for i in range(0, len(shards), window):
        indices = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in shards[i : i + window]])
        parts.append(rng.permutation(indices))
    return np.concatenate(parts)


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
        order = shuffled_order(self.shard_sizes, self.seed, epoch)[: self.progress.usable]
        global_batch = self.batch_size * self.world_size
        for start in range(consumed, len(order) - global_batch + 1, global_batch):
            mine = order[start + self.rank * self.batch_size :][: self.batch_size]
            yield [SampleRef(int(i), epoch) for i in mine]


class EvalBatches(Sampler[list[SampleRef]]):
    """One rank's share of all samples, in order. Ranks get equally many; the surplus ones are marked as padding.

    Args:
        num_samples: Samples of the set.
        batch_size: Samples of this rank in a step.
        rank: This process.
        world_size: Number of processes.
    """

    def __init__(self, num_samples: int, batch_size: int, rank: int, world_size: int) -> None:
        share = -(-num_samples // world_size)
        self.batch_size = batch_size
        self.refs = [
            SampleRef(min(i, num_samples - 1), 0, i >= num_samples) for i in range(rank, share * world_size, world_size)
        ]

    def __len__(self) -> int:
        return -(-len(self.refs) // self.batch_size)

    def __iter__(self) -> Iterator[list[SampleRef]]:
        for i in range(0, len(self.refs), self.batch_size):
            yield self.refs[i : i + self.batch_size]

"""ResumableDataModule: data module that saves its position with every checkpoint and resumes from it."""

import signal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, Dataset

from ..cli.argument_types import check_types, check_workers
from ..distributed.strategy import data_rank
from ..errors import UserError
from ..lightning_internals import has_distributed_sampler
from .sampler import ORDER, EvalBatches, Permutation, Position, Progress, TrainBatches

MAX_BATCH = 2**20  # samples per rank and step


class ResumableDataModule(L.LightningDataModule):
    """Gives every rank its slice of one global order, and continues at the position of a checkpoint.

    The position is a function of the number of batches trained, which the trainer counts.

    Args:
        batch_size: Samples per rank and step.
        num_workers: Loader workers per rank; 0 loads in the main process.
        seed: Seed of the order.
        sample_noun: Plural noun for samples in messages.

    Raises:
        UserError: If a number is out of range.
    """

    def __init__(self, batch_size: int, num_workers: int, seed: int, sample_noun: str) -> None:
        super().__init__()
        numbers = {"batch_size": batch_size, "num_workers": num_workers, "seed": seed}
        check_types(ResumableDataModule.__init__, numbers)
        if not 1 <= batch_size <= MAX_BATCH:
            raise UserError(f"{batch_size=}: expected a whole number from 1 to {MAX_BATCH}.")
        check_workers(num_workers)
        if not 0 <= seed < 2**32:
            raise UserError(f"{seed=} must be in [0, 2^32).")
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        self.sample_noun = sample_noun
        self.progress: Progress | None = None
        self._resume: dict | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks that split the data."""
        return data_rank(self.trainer).ranks

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return data_rank(self.trainer).rank

    @property
    def num_samples(self) -> int:
        """Number of samples in the training set."""
        raise NotImplementedError

    def count_samples(self) -> int:
        """Count the samples of the training set, without a trainer."""
        return self.num_samples

    @property
    def steps_per_epoch(self) -> int:
        """Training batches per rank and epoch, after `trainer.limit_train_batches`."""
        steps = self.num_samples // (self.batch_size * self.world_size)
        limit = 1.0 if self.trainer is None else self.trainer.limit_train_batches
        return min(steps, limit) if isinstance(limit, int) else int(steps * limit)

    def fixed(self) -> dict[str, object]:
        """Settings that cannot change when a run is resumed in the middle of an epoch."""
        return {"num_samples": self.num_samples, "seed": self.seed}

    def check_trainer(self) -> None:
        """Raise UserError if the trainer would also split the data."""
        trainer = self.trainer
        if trainer is not None and trainer.world_size > 1 and has_distributed_sampler(trainer):
            raise UserError("trainer.use_distributed_sampler must be false: the data module splits over ranks.")

    def check_steps(self) -> None:
        """Raise UserError if the training set is smaller than one global batch, or limited to zero batches."""
        if self.trainer is not None and self.trainer.limit_train_batches == 0:
            raise UserError("trainer.limit_train_batches=0 leaves no data to train on.")
        if self.steps_per_epoch < 1:
            raise UserError(
                f"the training set is smaller than one global batch of {self.batch_size} x {self.world_size} ranks."
            )

    def num_trained(self) -> int:
        """Number of batches per rank trained so far, over all epochs."""
        return 0 if self.trainer is None else self.trainer.fit_loop.epoch_loop.batch_progress.total.processed

    def train_batches(self, shard_sizes: list[int]) -> TrainBatches:
        """Create the sampler of training batches, starting at the current position."""
        self.progress = self._make_progress(self.batch_size * self.world_size)
        return TrainBatches(
            shard_sizes, self.batch_size, self.rank, self.world_size, self.seed, self.progress, self.num_trained
        )

    def eval_batches(self, num_samples: int, mixed: Permutation | None = None) -> EvalBatches:
        """Create the sampler of evaluation batches, in the order of the data set or a permuted one."""
        return EvalBatches(num_samples, self.batch_size, self.rank, self.world_size, mixed)

    def make_loader(self, samples: Dataset, batches, collate) -> DataLoader:
        """Create a loader whose workers ignore signals and do not use the main process's random generator."""
        return DataLoader(
            samples,
            batch_sampler=batches,
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            worker_init_fn=_leave_signals_to_the_main_process,
            generator=torch.Generator(),  # the loader must not use the generator of training
        )

    def _make_progress(self, global_batch: int) -> Progress:
        """Continue at the checkpoint's position; if the global batch changed, correct the trainer's batch count."""
        if self._resume is None:
            return Progress(self.num_samples, global_batch, limit=self.steps_per_epoch)
        for name, now in self.fixed().items():
            if self._resume.get(name, now) != now:
                raise UserError(
                    f"cannot resume in the middle of the data: the checkpoint was trained with {name}="
                    f"{self._resume[name]}, this run has {now}."
                )
        if self._resume.get("order", 1) != ORDER and self._resume["consumed"]:
            rank_zero_warn(
                f"The checkpoint is of a version with a different order of {self.sample_noun}: in this epoch some are "
                "seen twice and some are not seen."
            )
        if not self._resume["global_batch"] or self._resume["consumed"] > self.num_samples:
            raise UserError(f"the checkpoint's position is outside of the {self.num_samples} {self.sample_noun}.")
        start = Position(self._resume["epoch"], self._resume["consumed"])
        progress = Progress(self.num_samples, global_batch, start, self._resume["num_trained"], self.steps_per_epoch)
        if self._resume["global_batch"] != global_batch:
            noun = self.sample_noun
            rank_zero_warn(
                f"The global batch changed from {self._resume['global_batch']} to {global_batch} {noun}: all {noun} "
                "left in this epoch are still seen once; the learning-rate schedule continues by steps."
            )
            self._count_as_done(progress, start)
        return progress

    def _count_as_done(self, progress: Progress, start: Position) -> None:
        """Set the trainer's count of finished batches of the epoch, in the new batch size.

        At the end of an epoch these are all batches: the position in the data is already in the next epoch, but the
        trainer's counts are not.
        """
        batches = self.trainer.fit_loop.epoch_loop.batch_progress
        is_at_end = start.consumed == 0 and batches.current.processed > 0
        done = progress.steps_per_epoch - (0 if is_at_end else progress.remaining)
        unfinished = batches.total.processed - batches.total.completed  # 1 if the checkpoint was saved after a step
        batches.current.ready = batches.current.started = batches.current.processed = done
        batches.current.completed = done - unfinished

    def state_dict(self) -> dict:
        """Save the position in the training data."""
        if self.progress is None:
            return {}
        num_trained = self.num_trained()
        position = self.progress.position(num_trained)
        return {
            "epoch": position.epoch,
            "consumed": position.consumed,
            "num_trained": num_trained,
            "global_batch": self.progress.global_batch,
            "order": ORDER,
            **self.fixed(),
        }

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore the position of a checkpoint.

        Raises:
            UserError: If the state is invalid.
        """
        counts = {name: state_dict.get(name) for name in ("epoch", "consumed", "num_trained", "global_batch")}
        if state_dict and not all(type(count) is int and count >= 0 for count in counts.values()):
            raise UserError(f"the checkpoint has an invalid data position {counts}; expected non-negative counts.")
        self._resume = state_dict or None


def _leave_signals_to_the_main_process(worker: int) -> None:
    """Ignore signals in a worker: a signal to the process group must not end workers before the main process saves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_later)


def _end_later(signum: int, frame: object) -> None:
    """Exit one minute after the first SIGTERM, immediately on the second, so that no worker blocks its parent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.alarm(60)

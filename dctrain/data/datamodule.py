"""ResumableDataModule: where training stands in the data, saved with every checkpoint and taken up from it."""

import signal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, Dataset

from ..cli.argument_types import check_types, check_workers
from ..distributed.strategy import data_rank
from ..errors import UserError
from .sampler import ORDER, EvalBatches, Permutation, Position, Progress, TrainBatches

MAX_BATCH = 2**20  # samples of a rank in a step


class ResumableDataModule(L.LightningDataModule):
    """Gives every rank its slice of one global order, and goes on in it where a checkpoint stopped.

    The position is a function of the number of batches trained, which the trainer counts; nothing else is stored.

    Args:
        batch_size: Samples of one rank in a step.
        num_workers: Loader processes of a rank; 0 loads in the main process.
        seed: Seed of the order.
        sample_noun: What a sample is called in messages, in the plural.

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
        """This process among them."""
        return data_rank(self.trainer).rank

    @property
    def num_samples(self) -> int:
        """Samples of the training set."""
        raise NotImplementedError

    def count_samples(self) -> int:
        """Count the samples of the training set, without a trainer."""
        return self.num_samples

    @property
    def steps_per_epoch(self) -> int:
        """Training batches of each rank in an epoch, `trainer.limit_train_batches` applied."""
        steps = self.num_samples // (self.batch_size * self.world_size)
        limit = 1.0 if self.trainer is None else self.trainer.limit_train_batches
        return min(steps, limit) if isinstance(limit, int) else int(steps * limit)

    def fixed(self) -> dict[str, object]:
        """Tell what cannot change in the middle of a run."""
        return {"num_samples": self.num_samples, "seed": self.seed}

    def check_trainer(self) -> None:
        """Refuse a trainer that would split the data a second time."""
        trainer = self.trainer
        if trainer is not None and trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
            raise UserError("trainer.use_distributed_sampler must be false: the data module splits over ranks itself.")

    def check_steps(self) -> None:
        """Refuse a training set that is smaller than a step, or limited to none."""
        if self.trainer is not None and self.trainer.limit_train_batches == 0:
            raise UserError("trainer.limit_train_batches=0 leaves nothing to train on.")
        if self.steps_per_epoch < 1:
            raise UserError(
                f"the training set is smaller than one global batch of {self.batch_size} x {self.world_size} ranks."
            )

    def num_trained(self) -> int:
        """Count the batches of each rank trained so far, over all epochs."""
        return 0 if self.trainer is None else self.trainer.fit_loop.epoch_loop.batch_progress.total.processed

    def train_batches(self, shard_sizes: list[int]) -> TrainBatches:
        """Make the sampler of training batches, from the position that training has reached."""
        self.progress = self._make_progress(self.batch_size * self.world_size)
        return TrainBatches(
            shard_sizes, self.batch_size, self.rank, self.world_size, self.seed, self.progress, self.num_trained
        )

    def eval_batches(self, num_samples: int, mixed: Permutation | None = None) -> EvalBatches:
        """Make the sampler of evaluation batches, of the set in its own order or a mixed one."""
        return EvalBatches(num_samples, self.batch_size, self.rank, self.world_size, mixed)

    def make_loader(self, samples: Dataset, batches, collate) -> DataLoader:
        """Make a loader whose workers leave signals and random numbers to the main process."""
        return DataLoader(
            samples,
            batch_sampler=batches,
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            worker_init_fn=_leave_signals_to_the_main_process,
            generator=torch.Generator(),  # the loader must not draw from the generator that training uses
        )

    def _make_progress(self, global_batch: int) -> Progress:
        """Go on where the checkpoint stopped; where the global batch changed, correct the trainer's batch count."""
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
                f"The checkpoint is of a version that ordered {self.sample_noun} otherwise: of this epoch's, some are "
                "seen twice and some not."
            )
        if not self._resume["global_batch"] or self._resume["consumed"] > self.num_samples:
            raise UserError(f"the checkpoint tells a position outside the {self.num_samples} {self.sample_noun}.")
        start = Position(self._resume["epoch"], self._resume["consumed"])
        progress = Progress(self.num_samples, global_batch, start, self._resume["num_trained"], self.steps_per_epoch)
        if self._resume["global_batch"] != global_batch:
            noun = self.sample_noun
            rank_zero_warn(
                f"The global batch changed from {self._resume['global_batch']} to {global_batch} {noun}: all {noun} "
                "left in this epoch are still seen once; the learning-rate schedule goes on by steps."
            )
            self._count_as_done(progress, start)
        return progress

    def _count_as_done(self, progress: Progress, start: Position) -> None:
        """Tell the trainer how many of its epoch's batches, in the new size, lie behind it.

        At the end of an epoch that is all of them: the position in the data is already in the next epoch, and the
        trainer's counts are not.
        """
        batches = self.trainer.fit_loop.epoch_loop.batch_progress
        is_at_end = start.consumed == 0 and batches.current.processed > 0
        done = progress.steps_per_epoch - (0 if is_at_end else progress.remaining)
        unfinished = batches.total.processed - batches.total.completed  # 1 where the checkpoint was saved after a step
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
        """Take over the position of a checkpoint.

        Raises:
            UserError: If it is none.
        """
        counts = {name: state_dict.get(name) for name in ("epoch", "consumed", "num_trained", "global_batch")}
        if state_dict and not all(type(count) is int and count >= 0 for count in counts.values()):
            raise UserError(f"the checkpoint tells no position in the data: {counts}; expected counts.")
        self._resume = state_dict or None


def _leave_signals_to_the_main_process(worker: int) -> None:
    """A signal to the whole process group must not end the workers before the main process has saved."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_later)


def _end_later(signum: int, frame: object) -> None:
    """End a minute after the first SIGTERM, at once at the second: no worker may outlive a parent that waits for it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.alarm(60)

"""Graceful stop on signals, such as a preemption."""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from ..errors import RunStopped
from ..lightning_internals import log_training_step
from .checkpoints import LastCheckpoint, is_accumulating
from .validation import DueValidation

STOP_CHECK_STEPS = 10  # ranks agree on a stop every n steps, because it needs a synchronization


class GracefulStop(Callback):
    """Finishes the step, saves a checkpoint and ends the run on SIGTERM, SLURM's SIGUSR1, or the first Ctrl-C.

    A validation is ended after the current batch; the resumed run repeats it. The validation after the last step of
    `max_steps` is completed. Before the first step the run ends immediately, because there is nothing to save.

    Ranks agree on the step, so the signal may reach one or all of them. It replaces Lightning's SIGTERM handler, which
    waits for the other ranks within the signal handler and can hang.

    Args:
        last: Callback that saves the checkpoint; must come after this one.
        due: Callback that tracks pending validations; must come before this one.
    """

    def __init__(self, last: LastCheckpoint, due: DueValidation) -> None:
        self.last, self.due = last, due
        self._signum: int | None = None
        self._previous: dict[int, object] = {}
        self._has_nothing_to_save = True

    def _note(self, signum: int, frame: object) -> None:
        if self._has_nothing_to_save:
            raise RunStopped(signum, self.last.newest)
        if signum == signal.SIGINT and self._signum is not None:
            raise KeyboardInterrupt
        self._signum = signum

    def _take_signals(self, trainer: L.Trainer) -> None:
        """Install the signal handlers, after Lightning's."""
        self._has_nothing_to_save = trainer.world_size == 1  # with several ranks the others would wait
        for signum in () if self._previous else (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            self._previous[signum] = signal.signal(signum, self._note)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Install the signal handlers."""
        self._take_signals(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Install the signal handlers, then run the validation that was interrupted before the resume."""
        self._take_signals(trainer)
        if self.due.take(trainer):
            self.last.save(trainer, again=True)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx) -> None:
        """Stop the run if any rank received a signal and no gradients are being accumulated."""
        self._has_nothing_to_save = False
        if is_accumulating(trainer, batch_idx):
            return
        if trainer.world_size > 1 and trainer.global_step % STOP_CHECK_STEPS:
            return
        if self._is_stop_requested(trainer):
            log_training_step(trainer)
            self._stop(trainer)

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx, dataloader_idx=0
    ) -> None:
        """Stop the run if any rank received a signal, unless ranks may have different numbers of batches."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        if trainer.world_size > 1 and (batch_idx % STOP_CHECK_STEPS or any(map(math.isinf, trainer.num_val_batches))):
            return
        if self._is_stop_requested(trainer):
            with _as_before_validation(trainer):
                self._stop(trainer)

    def _is_stop_requested(self, trainer: L.Trainer) -> bool:
        if 0 < trainer.max_steps <= trainer.global_step:  # a finished run cannot be resumed for its last validation
            return False
        return trainer.strategy.reduce_boolean_decision(self._signum is not None, all=False)

    def _stop(self, trainer: L.Trainer) -> NoReturn:
        raise RunStopped(self._signum or signal.SIGTERM, self.last.save(trainer))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore the signal handlers."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()


@contextmanager
def _as_before_validation(trainer: L.Trainer) -> Iterator[None]:
    """Set the loops' state during the body to the end of the step before the validation."""
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress, loop.val_loop.batch_progress
    before = [part.state_dict() for part in progress]
    loop.batch_progress.total.completed -= 1
    loop.batch_progress.current.completed -= 1
    loop.val_loop.batch_progress.reset()
    trainer.training = True
    try:
        yield
    finally:
        trainer.validating = True
        for part, state in zip(progress, before, strict=True):
            part.load_state_dict(state)

"""Trainer callbacks: the newest and the best checkpoint, a graceful stop on signals, and speed in TensorBoard."""

import math
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from .errors import Diverged, UserError
from .flops import peak_flops

STOP_CHECK_STEPS = 10  # ranks agree on stopping every so many steps: agreeing costs a synchronisation


class LastCheckpoint(Callback):
    """Keeps the full state of the newest step: at the start, every so many steps, at the end, and at a stop.

    It writes `checkpoints/last-step=N.ckpt` in the run's folder and then removes those before, so that a whole
    checkpoint exists at any moment. While steps are skipped for not being finite it saves only if the run is stopped,
    and weights that are not finite never, so that a run that diverges leaves the last checkpoint it was well at.

    Args:
        every_n_steps: Optimiser steps between checkpoints.

    Attributes:
        newest: The checkpoint that a run can be taken up from; None before the first.
    """

    def __init__(self, every_n_steps: int = 500) -> None:
        if every_n_steps < 1:
            raise UserError(f"checkpoint_every_n_steps={every_n_steps} must be at least 1.")
        self.every_n_steps = every_n_steps
        self.newest: Path | None = None
        self._outdated: set[Path] = set()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save before the first step; a resumed run has the checkpoint it came from.

        Not under FSDP, where saving an unused optimiser counts as one of its steps.
        """
        if trainer.ckpt_path is not None:
            self.newest = Path(trainer.ckpt_path)
            self._outdated = _of_before(trainer, r"last-step=\d+\.ckpt(\.\d+\.partial)?")
        elif not isinstance(trainer.strategy, ModelParallelStrategy):
            self.save(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx) -> None:
        """Save every so many optimiser steps."""
        if trainer.global_step % self.every_n_steps or _is_accumulating(trainer, batch_idx):
            return
        if not pl_module.skipped_in_a_row:
            self.save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the end."""
        self.save(trainer)

    def _path(self, trainer: L.Trainer) -> Path:
        return Path(trainer.log_dir) / "checkpoints" / f"last-step={trainer.global_step}.ckpt"

    def save(self, trainer: L.Trainer, again: bool = False) -> Path:
        """Save now, on all ranks together, unless this step is saved already; return the file.

        Args:
            trainer: The trainer.
            again: Save even if this step is saved.

        Raises:
            Diverged: If a weight is not finite.
        """
        path = self._path(trainer)
        if again or path != self.newest:
            if not _has_finite_weights(trainer):
                raise Diverged(f"step {trainer.global_step}: weights are not finite; nothing was saved.", self.newest)
            trainer.save_checkpoint(path, weights_only=False)
            for old in self._outdated - {path} if trainer.is_global_zero else ():
                old.unlink(missing_ok=True)
            self.newest, self._outdated = path, {path}
        return path

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Tell who diverged where to go back to."""
        if isinstance(exception, Diverged):
            exception.checkpoint = self.newest


def _of_before(trainer: L.Trainer, name: str) -> set[Path]:
    """Find the checkpoints that a run has in its folder when it is resumed: of a folder that is its own."""
    if not isinstance(trainer.logger, TensorBoardLogger | CSVLogger):
        return set()
    found = (Path(trainer.log_dir) / "checkpoints").glob("*")
    return {path for path in found if re.fullmatch(name, path.name)}


def _has_finite_weights(trainer: L.Trainer) -> bool:
    """Tell whether the weights of all ranks are finite."""
    parts = (p.to_local() if hasattr(p, "to_local") else p for p in trainer.lightning_module.parameters())
    return trainer.strategy.reduce_boolean_decision(all(bool(part.isfinite().all()) for part in parts), all=True)


def _is_accumulating(trainer: L.Trainer, batch_idx: int) -> bool:
    """Tell whether gradients are waiting for their step; a checkpoint would lose them."""
    return bool((batch_idx + 1) % trainer.accumulate_grad_batches) and not trainer.is_last_batch


PATHS_OF_BEST = ("best_model_path", "kth_best_model_path", "last_model_path")


class BestCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint`, that knows its files again in a run's folder that was moved or named otherwise.

    A score that is not finite is never best.
    """

    _outdated: set[Path] = frozenset()

    def _save_topk_checkpoint(self, trainer: L.Trainer, monitor_candidates: dict[str, torch.Tensor]) -> None:
        value = monitor_candidates.get(self.monitor)
        if value is not None and not torch.as_tensor(value).isfinite():
            return
        super()._save_topk_checkpoint(trainer, monitor_candidates)
        if self.best_k_models:
            for old in self._outdated - set(map(Path, self.best_k_models)) if trainer.is_global_zero else ():
                old.unlink(missing_ok=True)
            self._outdated = set()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See what was best in this folder before a resume, and is not known to the checkpoint it comes from."""
        super().on_train_start(trainer, pl_module)
        if trainer.ckpt_path is not None:
            self._outdated = _of_before(trainer, r"best-(epoch|step)=\d+-(top1|loss)=[\d.]+\.ckpt")

    def load_state_dict(self, state_dict: dict) -> None:
        """Take up what was best so far; forget it if its file does not lie in this run's folder."""

        def here(path: str) -> str:
            return str(Path(self.dirpath) / Path(path).name) if path else path

        if not Path(here(state_dict["best_model_path"])).is_file():
            return
        paths = {name: here(state_dict[name]) for name in PATHS_OF_BEST}
        best = {here(path): score for path, score in state_dict["best_k_models"].items()}
        super().load_state_dict(state_dict | paths | {"best_k_models": best, "dirpath": self.dirpath})


class RunStopped(BaseException):
    """Ends a run that was told to stop, after its checkpoint was saved. No error: nothing but the command line
    catches it.

    Args:
        signum: The signal that asked for it.
        checkpoint: Where the run can be taken up; None if it has not begun.
    """

    def __init__(self, signum: int, checkpoint: Path | None) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.checkpoint = checkpoint


class GracefulStop(Callback):
    """On SIGTERM (or the first Ctrl-C) finish the step, save a checkpoint and end the run.

    In a validation it ends behind the batch at hand; the resumed run takes the whole validation again, also where the
    stop came between a step and its validation. What follows the last of `max_steps` is finished. Before the first step
    there is nothing to save: the run ends at once.

    Ranks agree on the step to stop at, so a signal may reach one of them or all. It takes the place of Lightning's own
    SIGTERM handler, which waits for the other ranks inside the signal handler and can hang.

    Args:
        last: Saves the checkpoint.
    """

    def __init__(self, last: LastCheckpoint) -> None:
        self.last = last
        self._signum: int | None = None
        self._previous: dict[int, object] = {}
        self._has_nothing_to_save = True
        self._due_in_epoch: int | None = None  # the epoch of a validation that a stop has cut off

    def _note(self, signum: int, frame: object) -> None:
        if self._has_nothing_to_save:
            raise RunStopped(signum, self.last.newest)
        if signum == signal.SIGINT and self._signum is not None:
            raise KeyboardInterrupt
        self._signum = signum

    def _take_signals(self, trainer: L.Trainer) -> None:
        """Take over the signals, after Lightning did."""
        self._has_nothing_to_save = trainer.world_size == 1  # of several ranks the others would wait
        for signum in () if self._previous else (signal.SIGTERM, signal.SIGINT):
            self._previous[signum] = signal.signal(signum, self._note)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over the signals."""
        self._take_signals(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over the signals; take the validation that a stop has cut off."""
        self._take_signals(trainer)
        if self._due_in_epoch is not None:
            epoch, self._due_in_epoch = self._due_in_epoch, None
            _validate(trainer, epoch)
            self.last.save(trainer, again=True)  # it is no longer due

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx) -> None:
        """Stop the run if any rank was told to, once no gradient is waiting for its step."""
        self._has_nothing_to_save = False
        if _is_accumulating(trainer, batch_idx):
            return
        if trainer.world_size > 1 and trainer.global_step % STOP_CHECK_STEPS:
            return
        if self._is_told_to_stop(trainer):
            trainer._logger_connector.update_train_step_metrics()  # the trainer would log this step only now
            loop = trainer.fit_loop
            self._stop(trainer, is_due=loop.epoch_loop._should_check_val_fx(loop._data_fetcher))

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx, dataloader_idx=0
    ) -> None:
        """Stop the run if any rank was told to; ranks that cannot know that they take equally many batches go on."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        if trainer.world_size > 1 and (batch_idx % STOP_CHECK_STEPS or any(map(math.isinf, trainer.num_val_batches))):
            return
        if self._is_told_to_stop(trainer):
            with _as_before_validation(trainer):
                self._stop(trainer, is_due=True)

    def _is_told_to_stop(self, trainer: L.Trainer) -> bool:
        if 0 < trainer.max_steps <= trainer.global_step:  # a run that is done cannot be resumed for its last validation
            return False
        return trainer.strategy.reduce_boolean_decision(self._signum is not None, all=False)

    def _stop(self, trainer: L.Trainer, is_due: bool) -> NoReturn:
        self._due_in_epoch = trainer.current_epoch if is_due else None
        raise RunStopped(self._signum or signal.SIGTERM, self.last.save(trainer, again=is_due))

    def state_dict(self) -> dict:
        """Save which validation has been cut off."""
        return {"due_in_epoch": self._due_in_epoch}

    def load_state_dict(self, state_dict: dict) -> None:
        """Take it up."""
        self._due_in_epoch = state_dict["due_in_epoch"]

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the signals back."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()


@contextmanager
def _as_before_validation(trainer: L.Trainer) -> Iterator[None]:
    """Let the loops be for the body as they were when the step before a validation had ended."""
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


def _validate(trainer: L.Trainer, epoch: int) -> None:
    """Run the validation that belongs behind the last step, in its epoch, and log it there."""
    loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    now, epochs.completed = epochs.completed, epoch
    loop._batches_that_stepped = trainer.global_step - 1
    loop.val_loop.restarting = False
    is_first = trainer._logger_connector._first_loop_iter
    trainer.validating = True
    loop.val_loop.run()
    trainer.training = True
    trainer._logger_connector._first_loop_iter = is_first
    epochs.completed = now


class SpeedMonitor(Callback):
    """Logs units/s (images, tokens) over all ranks and model FLOPs utilisation between logs.

    A step counts as three forward passes; recomputing for memory is not counted.
    """

    def __init__(self) -> None:
        self._units = 0
        self._start = 0.0
        self._paused = 0.0
        self._peak = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find out what the device could do."""
        low = torch.float16 if "16-" in trainer.precision and "bf16" not in trainer.precision else torch.bfloat16
        dtype = low if "16" in trainer.precision and pl_module.device.type == "cuda" else torch.float32
        self._peak = peak_flops(pl_module.device, dtype)
        self._restart()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave what is between epochs out of the measurement."""
        self._restart()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let it go on."""
        self._start += time.perf_counter() - self._paused

    def _restart(self) -> None:
        self._units, self._start = 0, time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx) -> None:
        """Count; log where the trainer logs."""
        self._units += pl_module.count_units(batch)
        if (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % trainer.log_every_n_steps:
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        rate = self._units / (time.perf_counter() - self._start)
        utilisation = 3 * pl_module.forward_flops * rate / self._peak
        pl_module.log(f"train/{pl_module.speed_unit}_per_second", rate * trainer.world_size)
        pl_module.log("train/mfu", utilisation)
        self._restart()

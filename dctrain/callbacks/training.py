"""The callbacks of every training run, in order."""

from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar

from .checkpoints import BestCheckpoint, LastCheckpoint
from .console import RunProgressBar
from .costs import CostRecord
from .preemption import GracefulStop
from .run_record import RunRecord
from .speed import SpeedMonitor
from .steps import StepAxis
from .validation import DueValidation


def training_callbacks(
    of_user: Sequence[Callback],
    checkpoint_every_n_steps: int,
    record: RunRecord,
    best: BestCheckpoint | None,
    has_progress_bar: bool,
) -> list[Callback]:
    """Return the user's callbacks and this project's, in order.

    The last step is validated before other callbacks end the run, and its step is logged before a stop logs metrics.
    """
    of_user = list(of_user)
    if has_progress_bar and not any(isinstance(callback, ProgressBar) for callback in of_user):
        of_user.append(RunProgressBar())
    last, due = LastCheckpoint(checkpoint_every_n_steps), DueValidation()
    callbacks = [StepAxis(), due, *of_user, GracefulStop(last, due), last, SpeedMonitor(), CostRecord(), record]
    return callbacks if best is None else [*callbacks, best]


def best_checkpoint(folder: Path, monitor: str, mode: str, filename: str) -> BestCheckpoint:
    """Create the callback that keeps the checkpoint with the best value of a metric."""
    return BestCheckpoint(
        dirpath=folder,
        monitor=monitor,
        mode=mode,
        filename=filename,
        auto_insert_metric_name=False,
        enable_version_counter=False,
        save_on_train_epoch_end=False,  # save after each validation, at any position in an epoch
    )


def place_checkpoints(callbacks: Sequence[Callback], folder: Path) -> None:
    """Set the folder of every `ModelCheckpoint` without one; Lightning would use the first logger's."""
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(folder.resolve())

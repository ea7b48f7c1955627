"""Validations that Lightning omits: one interrupted by the end of a run, and that of the last step."""

from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback

from ..checkpointing.checkpoint import map_checkpoint
from ..lightning_internals import is_validation_next, validating


class DueValidation(Callback):
    """Tracks whether the validation after the last step is pending, and saves this in every checkpoint.

    A resumed run starts with the pending validation, so that neither a stop nor a kill during a validation loses it. A
    run whose last step is not a multiple of the interval is validated at its end, so that its final score is logged and
    can be the best.
    """

    def __init__(self) -> None:
        self._due_in_epoch: int | None = None  # epoch of the pending validation
        self._validated_step = 0
        self._completed: int | None = None  # completed epochs, during the pending validation of one of them

    def take(self, trainer: L.Trainer) -> bool:
        """Run the pending validation of a resumed run; return whether there was one."""
        if self._due_in_epoch is None:
            return False
        self._validate(trainer, self._due_in_epoch)
        return True

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx) -> None:
        """Record whether a validation follows."""
        self._due_in_epoch = trainer.current_epoch if is_validation_next(trainer) else None

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Clear the pending validation."""
        if not trainer.sanity_checking:
            self._due_in_epoch, self._validated_step = None, trainer.global_step

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validate the last step, unless it was validated."""
        if self._validated_step != trainer.global_step:
            self._validate(trainer, trainer.fit_loop.epoch_progress.current.processed - 1)

    def _validate(self, trainer: L.Trainer, epoch: int) -> None:
        """Run the validation of the last step, in its epoch."""
        loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
        self._completed, epochs.completed = epochs.completed, epoch
        loop.val_loop.restarting = False
        with validating(trainer):
            loop.val_loop.run()
        epochs.completed, self._completed = self._completed, None

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict) -> None:
        """Set the completed epochs in a checkpoint saved during the validation."""
        if self._completed is not None:
            checkpoint["epoch"] = self._completed
            checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"] = self._completed

    def state_dict(self) -> dict:
        """Save the pending validation and the last validated step."""
        return {"due_in_epoch": self._due_in_epoch, "validated_step": self._validated_step}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore the state."""
        self._due_in_epoch, self._validated_step = state_dict["due_in_epoch"], state_dict["validated_step"]


def is_validation_due(path: Path) -> bool:
    """Whether a run resumed from a checkpoint starts with a pending validation."""
    state = map_checkpoint(path).get("callbacks", {}).get(DueValidation.__qualname__, {})
    return isinstance(state, dict) and state.get("due_in_epoch") is not None

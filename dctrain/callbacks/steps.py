"""The steps of curves."""

import lightning as L
from lightning.pytorch.callbacks import Callback


class StepAxis(Callback):
    """Logs metrics at the number of optimiser steps taken, which is also in the names of checkpoints.

    Lightning alone would log the metrics of step 100, and of the validation after it, at step 99.
    """

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args) -> None:
        """Set the step of what was logged in this step."""
        self._log(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Set the step of what this validation logs."""
        if not trainer.sanity_checking:
            self._log(trainer, pl_module, sync_dist=True)

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule, **options) -> None:
        """Log `step`, which Lightning takes for the curves, and the epoch, which it then leaves out."""
        steps = {"step": float(trainer.global_step), "epoch": float(trainer.current_epoch)}
        pl_module.log_dict(steps, batch_size=1, **options)

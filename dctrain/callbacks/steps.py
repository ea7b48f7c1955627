"""Step axis of logged metrics."""

import lightning as L
from lightning.pytorch.callbacks import Callback


class StepAxis(Callback):
    """Logs metrics at the number of completed optimizer steps, as in checkpoint names.

    Lightning would log the metrics of step 100, and of the validation after it, at step 99.
    """

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args) -> None:
        """Set the step of this step's metrics."""
        self._log(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Set the step of this validation's metrics."""
        if not trainer.sanity_checking:
            self._log(trainer, pl_module, sync_dist=True)

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule, **options) -> None:
        """Log `step`, which Lightning uses as the step axis, and the epoch, which it then omits."""
        steps = {"step": float(trainer.global_step), "epoch": float(trainer.current_epoch)}
        pl_module.log_dict(steps, batch_size=1, **options)

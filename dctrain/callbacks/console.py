"""Progress bar of a run."""

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar


class RunProgressBar(TQDMProgressBar):
    """Lightning's progress bar without the logger's version."""

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict:
        """Remove `v_num`."""
        return {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}

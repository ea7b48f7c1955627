"""What a run prints while it trains."""

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar


class RunProgressBar(TQDMProgressBar):
    """Lightning's progress bar, without the version of the logger, which the last line of a run names."""

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict:
        """Leave out `v_num`."""
        return {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}

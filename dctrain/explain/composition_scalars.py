"""Logging of composition statistics during training."""

from contextlib import ExitStack

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import nn

from dcmha.analysis import MixingMeter, measure_mixing

from ..errors import UserError, as_user_error


class CompositionScalars(Callback):
    """Logs size, effective rank and static share of each composition at every validation.

        fit ... --trainer.callbacks+=CompositionScalars

    The metrics are `composition/LAYER/COMPOSITION WHAT`, as defined in `dcmha.analysis.Mixing`: sizes are relative to
    the identity, means over tokens. Training is not affected. For the first batches of a validation each layer
    temporarily needs nine H x H matrices per token, and 64 singular value decompositions per sequence and composition;
    a compiled model runs eagerly for them. Values are averaged over ranks; with tensor parallelism each rank measures
    its own heads.

    Args:
        batches: Number of measured batches per validation.

    Raises:
        UserError: If `batches` is less than 1, or, before training, if the model composes nothing.
    """

    def __init__(self, batches: int = 1) -> None:
        if batches < 1:
            raise UserError(f"CompositionScalars' {batches=} must be at least 1.")
        self.batches = batches
        self._open = ExitStack()
        self._meters: dict[str, dict[str, MixingMeter]] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that the model has compositions."""
        with as_user_error("CompositionScalars", ValueError), measure_mixing(_model(pl_module)):
            pass

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start measuring."""
        self._meters = self._open.enter_context(measure_mixing(_model(pl_module)))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int, dataloader_idx=0) -> None:
        """Stop measuring after the first batches."""
        if batch_idx + 1 == self.batches:
            self._open.close()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the statistics."""
        self._open.close()
        values = {}
        for layer, both in self._meters.items():
            for composition, meter in both.items():
                mixing, name = meter.mixing(), f"composition/{layer}/{composition}"
                values |= {f"{name} {branch}": size.mean for branch, size in mixing.sizes.items()}
                values[f"{name} effective rank"] = mixing.effective_rank.mean
                values[f"{name} static share"] = mixing.shares["static"]
        pl_module.log_dict(values, sync_dist=True)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore the model."""
        self._open.close()


def _model(pl_module: L.LightningModule) -> nn.Module:
    """Return the network used in validation: the averaged one if there is one."""
    return getattr(pl_module, "evaluated", pl_module.model)

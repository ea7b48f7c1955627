"""Composition as it is learnt, in TensorBoard."""

from contextlib import ExitStack

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import nn

from dcmha.analysis import MixingMeter, measure_mixing

from ..errors import UserError, as_user_error


class CompositionScalars(Callback):
    """Logs at every validation how large each branch of each composition is, its effective rank and its static share.

        fit ... --trainer.callbacks+=CompositionScalars

    The curves are `composition/LAYER/COMPOSITION WHAT`, and what they are, `dcmha.analysis.Mixing` says: sizes are over
    that of the identity, means over tokens. Steps of training are as without it. For the first batches of a validation
    a layer holds nine matrices of H x H for each token, one layer at a time, and of each sequence and composition takes
    the singular values of 64; a compiled model runs eagerly for them. Several ranks are averaged, of
    which each measures its own heads where heads are split.

    Args:
        batches: Of a validation, how many are looked at.

    Raises:
        UserError: If there are none; before training starts, if the model composes nothing.
    """

    def __init__(self, batches: int = 1) -> None:
        if batches < 1:
            raise UserError(f"CompositionScalars' {batches=} must be at least 1.")
        self.batches = batches
        self._open = ExitStack()
        self._meters: dict[str, dict[str, MixingMeter]] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """See whether there is something to measure."""
        with as_user_error("CompositionScalars", ValueError), measure_mixing(_model(pl_module)):
            pass

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to measure."""
        self._meters = self._open.enter_context(measure_mixing(_model(pl_module)))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int, dataloader_idx=0) -> None:
        """End after the first batches."""
        if batch_idx + 1 == self.batches:
            self._open.close()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log."""
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
        """Leave the model as it was."""
        self._open.close()


def _model(pl_module: L.LightningModule) -> nn.Module:
    """The network that a validation runs: the averaged one if an image model keeps one."""
    return getattr(pl_module, "evaluated", pl_module.model)

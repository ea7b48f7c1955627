"""Logging of training speed."""

import time

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ..distributed.strategy import data_rank
from ..lightning_internals import is_logging_step
from ..plan.flops import peak_flops
from .checkpoints import is_accumulating

PER_SECOND = "_per_second"  # suffix of the metric


def logged_speeds(log: EventAccumulator) -> list[float]:
    """Return the units/s in a run's loaded TensorBoard log."""
    tags = [tag for tag in log.Tags()["scalars"] if tag.endswith(PER_SECOND)]
    return [event.value for tag in tags for event in log.Scalars(tag)]


class SpeedMonitor(Callback):
    """Logs units/s (images, tokens) over all ranks and model FLOPs utilization, of the steps between two logs.

    A step counts as three forward passes; recomputation is not counted.
    """

    def __init__(self) -> None:
        self._units = 0
        self._start = 0.0
        self._paused = 0.0
        self._peak = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Determine the peak FLOP/s of the device."""
        low = torch.float16 if "16-" in trainer.precision and "bf16" not in trainer.precision else torch.bfloat16
        dtype = low if "16" in trainer.precision and pl_module.device.type == "cuda" else torch.float32
        self._peak = peak_flops(pl_module.device, dtype)
        self._restart()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restart the measurement, which excludes the time between epochs."""
        self._restart()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Pause the measurement."""
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Continue the measurement."""
        self._start += time.perf_counter() - self._paused

    def _restart(self) -> None:
        self._units, self._start = 0, time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx) -> None:
        """Count units, and log at the trainer's interval."""
        self._units += pl_module.count_units(batch)
        if not is_logging_step(trainer) or is_accumulating(trainer, batch_idx):
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        rate = self._units / (time.perf_counter() - self._start)
        rate *= data_rank(trainer).ranks
        utilization = 3 * pl_module.forward_flops * rate / (self._peak * trainer.world_size)
        pl_module.log(f"train/{pl_module.speed_unit}{PER_SECOND}", rate)
        pl_module.log("train/mfu", utilization)
        self._restart()

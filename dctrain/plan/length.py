"""Steps, FLOPs, time and cost of a planned run."""

import json
import math
import statistics
from pathlib import Path
from typing import NamedTuple

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ..callbacks.costs import COSTS
from ..callbacks.speed import logged_speeds
from ..errors import UserError, as_user_error
from ..run_dir import ENVIRONMENT
from ..run_length import count_run_steps, is_set
from ..utils.environment import read_environments

PASSES = 3  # forward passes per training step
MOST = 10**18  # FLOPs, devices
LOWEST = 1e-6  # smallest accepted MFU and TFLOP/s
PEAK_TFLOPS = 989.0  # H100 SXM, dense bfloat16


class Length(NamedTuple):
    """Length of a run.

    Attributes:
        steps: Optimizer steps; None if the size of the training set is unknown.
        units: Images or tokens per optimizer step, over all ranks.
        unit: Name of the units.
        flops: FLOPs of a forward pass per unit.
        epochs: Epochs, if they determine the length.
    """

    steps: int | None
    units: int
    unit: str
    flops: int
    epochs: int | None

    @property
    def total_flops(self) -> int | None:
        """FLOPs of the run; None if its steps are unknown."""
        return None if self.steps is None else PASSES * self.flops * self.units * self.steps

    def __str__(self) -> str:
        a_step = f"{PASSES * self.flops * self.units:.2e} FLOPs per step"
        epochs = "" if self.epochs is None else f"{self.epochs} epochs, "
        if self.steps is None:
            return f"{epochs}{a_step}; set --train_samples if the data are not available here"
        total = self.steps * self.units
        number = f"{total / 1e9:,.2f} billion" if total >= 1e7 else f"{total:,}"
        return f"{epochs}{self.steps:,} steps, {number} {self.unit}, {self.total_flops:.2e} FLOPs"


class Speed(NamedTuple):
    """Expected speed of a device.

    Attributes:
        flops: FLOP/s of training.
        source: Description of the source.
    """

    flops: float
    source: str


def count_steps(trainer: dict, num_samples: int | None, global_batch: int) -> int | None:
    """Count the optimizer steps of a run as in `TrainingModule`; None if the number of samples is unknown.

    Args:
        trainer: The trainer's arguments.
        num_samples: Samples of the training set, or None.
        global_batch: Samples per batch over all ranks.

    Raises:
        UserError: If the run has no limit, or the training set is smaller than a batch.
    """
    steps_per_epoch = None
    if num_samples is not None and is_set(trainer["max_epochs"]):
        batches = _batches_of_epoch(trainer, num_samples, global_batch)
        steps_per_epoch = -(-batches // trainer["accumulate_grad_batches"])
    return count_run_steps(trainer["max_steps"], trainer["max_epochs"], steps_per_epoch)


def _batches_of_epoch(trainer: dict, num_samples: int, global_batch: int) -> int:
    batches = num_samples // global_batch
    if batches < 1:
        raise UserError(f"train_samples={num_samples}: expected at least one global batch of {global_batch}.")
    limit = trainer.get("overfit_batches") or trainer.get("limit_train_batches")
    if limit is not None:
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    if batches < 1:
        raise UserError(f"trainer.limit_train_batches={limit} leaves no data to train on.")
    return batches


def stated_speed(mfu: float, peak_tflops: float) -> Speed:
    """Compute the speed of a device from model FLOPs utilization.

    Args:
        mfu: Fraction of the peak, in (0, 1].
        peak_tflops: Peak of a device, in TFLOP/s.

    Raises:
        UserError: If a number is out of range.
    """
    if not LOWEST <= mfu <= 1:
        raise UserError(f"mfu={mfu}: expected a fraction in [{LOWEST}, 1].")
    if not LOWEST <= peak_tflops <= 1e9:
        raise UserError(f"peak_tflops={peak_tflops}: expected {LOWEST} to 1e9, in TFLOP/s of one device.")
    return Speed(mfu * peak_tflops * 1e12, f"{100 * mfu:g} % of {peak_tflops:g} TFLOP/s")


def measured_speed(run: str) -> Speed:
    """Read the median speed of a device from the log of a run, in FLOP/s, for estimates of other models.

    Args:
        run: Folder of a run that logged to TensorBoard, the default.

    Raises:
        UserError: If it has no record of speed, costs and devices.
    """
    folder = Path(run)
    log = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    with as_user_error(f"throughput={run!r}: expected the folder of a finished run"):
        flops, unit, devices = _recorded(folder)
        log.Reload()
    rates = logged_speeds(log)
    rate = statistics.median(rates) if rates else 0.0
    if not (math.isfinite(rate) and rate > 0):
        raise UserError(f"throughput={run!r}: expected a run that logged its speed to TensorBoard; it logged none.")
    return Speed(rate * PASSES * flops / devices, f"{rate:,.1f} {unit}/s on {devices} of {run}")


def _recorded(folder: Path) -> tuple[int, str, int]:
    """Read the forward FLOPs per unit, the unit, and the number of devices of a run.

    Raises:
        UserError: If a value is missing or has the wrong type.
        OSError: If a file cannot be read.
    """
    where = read_environments(folder / ENVIRONMENT)
    last = where[-1] if isinstance(where, list) and where else None
    found = {
        COSTS: (json.loads((folder / COSTS).read_text()), {"forward_flops": int, "unit": str}),
        ENVIRONMENT: (last, {"devices": int}),
    }
    values = []
    for file, (content, fields) in found.items():
        for name, kind in fields.items():
            value = content.get(name) if isinstance(content, dict) else None
            if type(value) is not kind or (kind is int and not 0 < value < MOST):
                raise UserError(f"throughput={str(folder)!r}: expected {name} in its {file}; it has {value!r}.")
            values.append(value)
    return tuple(values)


def describe_time(length: Length, world: int, speed: Speed, hour_price: float | None) -> str:
    """Format the time of a run, in hours, and its price.

    Args:
        length: Length of the run, with known steps.
        world: Number of devices.
        speed: Speed of a device.
        hour_price: Price per device and hour, in any currency; None to omit the price.

    Raises:
        UserError: If the price is negative.
    """
    if hour_price is not None and not 0 <= hour_price < 1e9:
        raise UserError(f"hour_price={hour_price}: expected a number of at least 0.")
    hours = length.total_flops / (speed.flops * world) / 3600
    price = "" if hour_price is None else f", price {hours * world * hour_price:,.2f}"
    return f"{hours:,.2f} h, {hours * world:,.2f} device hours{price} (estimate: {speed.source}; without validation)"

"""Checks of trainer arguments that Lightning accepts but would ignore, or fail with later."""

import math
import os
from enum import Enum

import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import BackboneFinetuning, BatchSizeFinder, Callback, LearningRateFinder

from ..errors import UserError

MINIMUMS = {
    **dict.fromkeys(("log_every_n_steps", "accumulate_grad_batches", "check_val_every_n_epoch"), 1),
    **dict.fromkeys(("gradient_clip_val", "min_steps", "min_epochs"), 0),
}


def plain_values(value: object) -> object:
    """Replace enum values of a configuration, which are the defaults of some Lightning arguments, by their text,
    because the parser cannot write them.
    """
    if isinstance(value, Namespace):
        return Namespace({key: plain_values(part) for key, part in vars(value).items()})
    if isinstance(value, list):
        return [plain_values(part) for part in value]
    return value.value if isinstance(value, Enum) else value


UNSUPPORTED = {
    BatchSizeFinder: "it trains before the run; try sizes with `plan` and --data.batch_size",
    LearningRateFinder: "it changes the learning rate of the configuration; compare runs of several --model.lr",
    BackboneFinetuning: "it adds parameter groups that a resumed run lacks; use --init and --model.lr",
}
MAX_CPU_DEVICES = 8  # maximum processes, or one per core if there are more cores


def check_devices(config: dict) -> None:
    """Check the number of processes of a run on a CPU.

    Raises:
        UserError: If it is too large.
    """
    devices, accelerator = str(config.get("devices")), config.get("accelerator")
    is_on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available())
    most = max(MAX_CPU_DEVICES, os.cpu_count() or 1)
    if is_on_cpu and devices.isdecimal() and int(devices) > most:
        raise UserError(f"trainer.devices={devices}: expected at most {most} processes on this CPU.")


def check_callbacks(callbacks: list[Callback]) -> None:
    """Reject Lightning callbacks that change the configuration of a run, because it could not be resumed.

    Raises:
        UserError: If there is such a callback.
    """
    for callback in callbacks:
        for kind, message in UNSUPPORTED.items():
            if isinstance(callback, kind):
                raise UserError(f"trainer.callbacks: {kind.__name__} is not supported: {message}.")


def check_environment() -> None:
    """Check the environment variables in which launchers set ranks.

    Raises:
        UserError: If a value is not a number.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID"):
        value = os.environ.get(name)
        if value is not None and not value.isdecimal():
            raise UserError(f"{name}={value!r} in the environment: expected a number, as set by launchers.")


def _check_part(name: str, part: int | float | None) -> None:
    """Check that a limit is a number of batches, or a fraction of them."""
    if part is not None and not 0 <= part <= (1 if isinstance(part, float) else math.inf):
        raise UserError(f"trainer.{name}={part}: expected a number of batches, or a fraction in [0, 1].")


def check_trainer(config: dict) -> None:
    """Check the trainer's arguments.

    Raises:
        UserError: If an argument is out of range.
    """
    if config.get("gradient_clip_algorithm") not in (None, "norm"):
        got = getattr(config["gradient_clip_algorithm"], "value", config["gradient_clip_algorithm"])
        raise UserError(f"trainer.gradient_clip_algorithm={got!r}; expected 'norm'.")
    for name, least in MINIMUMS.items():
        if config.get(name) is not None and not least <= config[name] < math.inf:
            raise UserError(f"trainer.{name}={config[name]} must be at least {least}, and finite.")
    interval = config.get("val_check_interval")
    if isinstance(interval, int | float) and not 0 < interval < math.inf:
        message = "must be a positive number of steps, or part of an epoch."
        raise UserError(f"trainer.val_check_interval={interval} {message}")
    for name in ("limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches"):
        _check_part(name, config.get(name))
    limit = config.get("limit_train_batches")
    _check_part("limit_train_batches", limit)
    if limit == 0:
        raise UserError(f"trainer.limit_train_batches={limit} leaves no data to train on.")
    if config.get("max_steps") == 0:
        raise UserError("trainer.max_steps=0 must be at least 1, or -1 to use trainer.max_epochs.")

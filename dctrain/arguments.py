"""What Lightning's trainer takes, and would then fail with, or ignore."""

import math
import os
from enum import Enum

import torch
from jsonargparse import Namespace

from .errors import UserError

AT_LEAST = {
    **dict.fromkeys(("log_every_n_steps", "accumulate_grad_batches", "check_val_every_n_epoch"), 1),
    "gradient_clip_val": 0.0,
}


def plain_values(value: object) -> object:
    """Replace enumerated values of a configuration, as which Lightning declares some defaults, by their text: the
    parser cannot write the others.
    """
    if isinstance(value, Namespace):
        return Namespace({key: plain_values(part) for key, part in vars(value).items()})
    if isinstance(value, list):
        return [plain_values(part) for part in value]
    return value.value if isinstance(value, Enum) else value


MOST_ON_CPU = 8  # processes, or one for each core if there are more


def check_devices(config: dict) -> None:
    """Check the number of processes of a run on a CPU, where nothing else limits it.

    Raises:
        UserError: If there are too many.
    """
    devices, accelerator = str(config.get("devices")), config.get("accelerator")
    is_on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available())
    most = max(MOST_ON_CPU, os.cpu_count() or 1)
    if is_on_cpu and devices.isdecimal() and int(devices) > most:
        raise UserError(f"trainer.devices={devices}: expected at most {most} processes on this CPU.")


def check_trainer(config: dict) -> None:
    """Check the trainer's arguments.

    Raises:
        UserError: If one is out of range.
    """
    for name, least in AT_LEAST.items():
        if config.get(name) is not None and not least <= config[name] < math.inf:
            raise UserError(f"trainer.{name}={config[name]} must be at least {least}, and finite.")
    if config.get("val_check_interval") == 0:
        raise UserError("trainer.val_check_interval=0 must be a positive number of steps, or part of an epoch.")
    if config.get("max_steps") == 0:
        raise UserError("trainer.max_steps=0 must be at least 1, or -1 for as many as trainer.max_epochs has.")

"""What Lightning's trainer takes, and would then fail with, or ignore."""

import math

from .errors import UserError

AT_LEAST = {
    **dict.fromkeys(("log_every_n_steps", "accumulate_grad_batches", "check_val_every_n_epoch"), 1),
    "gradient_clip_val": 0.0,
}


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

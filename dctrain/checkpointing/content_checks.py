"""Checks of a checkpoint's content before it is used."""

from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError

TYPES = {
    **dict.fromkeys(("state_dict", "loops", "callbacks", "hyper_parameters"), dict),
    **dict.fromkeys(("optimizer_states", "lr_schedulers", "skipped_steps"), list),
    **dict.fromkeys(("global_step", "epoch"), int),
    "pytorch-lightning_version": str,
}


OF_DATA = ("DataModule", "datamodule_hyper_parameters")  # suffixes of the keys of data modules


def check_content(content: dict, path: Path) -> dict:
    """Check the types of the common parts of a checkpoint; return the checkpoint.

    Raises:
        UserError: If a type is wrong.
    """
    for name, kind in TYPES.items():
        if name in content and not isinstance(content[name], kind):
            got = type(content[name]).__name__
            raise UserError(f"{path} is not a checkpoint: its {name} is of type {got}, not {kind.__name__}.")
    for key, value in content.get("state_dict", {}).items():
        if not isinstance(key, str) or not _is_dense(value):
            raise UserError(f"{path} is not a checkpoint: state_dict[{key!r}] is not a dense tensor of real numbers.")
    for name, value in content.items():
        if str(name).endswith(OF_DATA) and not isinstance(value, dict):
            raise UserError(f"{path} is not a checkpoint: its {name} is of type {type(value).__name__}, not dict.")
    skipped = content.get("skipped_steps", [0, 0])
    if len(skipped) != 2 or not all(type(count) is int and count >= 0 for count in skipped):
        raise UserError(f"{path} is not a checkpoint: skipped_steps={skipped!r}; expected two counts.")
    for name in ("optimizer_states", "lr_schedulers"):
        if not all(isinstance(state, dict) for state in content.get(name, ())):
            raise UserError(f"{path} is not a checkpoint: its {name} is not a list of dict.")
    return content


def _is_dense(value: object) -> bool:
    """Whether a value is a tensor that can be copied to a parameter."""
    is_tensor = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return is_tensor and not value.is_complex()


def check_progress(content: dict, path: Path) -> None:
    """Check that a checkpoint has the progress of its run, with consistent counts.

    Raises:
        UserError: If not.
    """
    step = content["global_step"]
    try:
        fit = content["loops"]["fit_loop"]
        optimizer = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
        batches = fit["epoch_loop.batch_progress"]
        counts = [*batches["total"].values(), *batches["current"].values(), *fit["epoch_progress"]["total"].values()]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be resumed: its loops have no progress.") from error
    if optimizer != step or not all(type(count) is int and count >= 0 for count in [step, *counts]):
        raise UserError(f"{path} cannot be resumed: its loops do not match global_step={step!r}.")
    if not all(count >= step - 1 for count in batches["total"].values()):  # within a step one batch is not completed
        raise UserError(f"{path} cannot be resumed: it counts fewer batches than steps.")

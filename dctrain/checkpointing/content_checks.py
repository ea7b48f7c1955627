"""What a checkpoint must look like inside, whatever wrote it: checked before anything is made of it."""

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


OF_DATA = ("DataModule", "datamodule_hyper_parameters")  # how the names of what data modules keep end


def check_content(content: dict, path: Path) -> dict:
    """Check the types of what a checkpoint holds, as far as all checkpoints have it; return it.

    Raises:
        UserError: If one is another.
    """
    for name, kind in TYPES.items():
        if name in content and not isinstance(content[name], kind):
            got = type(content[name]).__name__
            raise UserError(f"{path} is no checkpoint: its {name} is of type {got}, not {kind.__name__}.")
    for key, value in content.get("state_dict", {}).items():
        if not isinstance(key, str) or not _is_dense(value):
            raise UserError(f"{path} is no checkpoint: state_dict[{key!r}] is no dense tensor of real numbers.")
    for name, value in content.items():
        if str(name).endswith(OF_DATA) and not isinstance(value, dict):
            raise UserError(f"{path} is no checkpoint: its {name} is of type {type(value).__name__}, not dict.")
    skipped = content.get("skipped_steps", [0, 0])
    if len(skipped) != 2 or not all(type(count) is int and count >= 0 for count in skipped):
        raise UserError(f"{path} is no checkpoint: skipped_steps={skipped!r} are no two counts.")
    for name in ("optimizer_states", "lr_schedulers"):
        if not all(isinstance(state, dict) for state in content.get(name, ())):
            raise UserError(f"{path} is no checkpoint: its {name} are no list of dict.")
    return content


def _is_dense(value: object) -> bool:
    """Tell whether a value is a tensor that a parameter can be filled with."""
    is_tensor = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return is_tensor and not value.is_complex()


def check_progress(content: dict, path: Path) -> None:
    """Check that a checkpoint tells how far its run is, and that its counts agree.

    Raises:
        UserError: If it does not, or one does not.
    """
    step = content["global_step"]
    try:
        fit = content["loops"]["fit_loop"]
        optimizer = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
        batches = fit["epoch_loop.batch_progress"]
        counts = [*batches["total"].values(), *batches["current"].values(), *fit["epoch_progress"]["total"].values()]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be resumed from: its loops do not tell how far the run is.") from error
    if optimizer != step or not all(type(count) is int and count >= 0 for count in [step, *counts]):
        raise UserError(f"{path} cannot be resumed from: its loops are not those of global_step={step!r}.")
    if not all(count >= step - 1 for count in batches["total"].values()):  # in mid-step one is not completed
        raise UserError(f"{path} cannot be resumed from: it counts fewer batches than steps.")

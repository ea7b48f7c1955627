"""What a checkpoint must look like inside, whatever wrote it: checked before anything is made of it."""

from pathlib import Path

from torch import Tensor

from .errors import UserError

TYPES = {
    **dict.fromkeys(("state_dict", "loops", "callbacks", "hyper_parameters"), dict),
    **dict.fromkeys(("optimizer_states", "lr_schedulers", "skipped_steps"), list),
    **dict.fromkeys(("global_step", "epoch"), int),
    "pytorch-lightning_version": str,
}


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
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise UserError(f"{path} is no checkpoint: state_dict[{key!r}] is no tensor.")
    for name in ("optimizer_states", "lr_schedulers"):
        if not all(isinstance(state, dict) for state in content.get(name, ())):
            raise UserError(f"{path} is no checkpoint: its {name} are no list of dict.")
    return content

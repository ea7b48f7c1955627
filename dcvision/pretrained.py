"""Classifiers with weights that timm can make: exported folders, and timm's own by name."""

from pathlib import Path

import timm
from torch import nn

from dctrain.errors import UserError, as_user_error

from .exported_config import check_exported_config


def is_exported(source: str) -> bool:
    """Tell whether `source` is a folder as `export` writes it."""
    return (Path(source) / "config.json").is_file()


def load_pretrained(source: str) -> nn.Module:
    """Make a model with its weights.

    Args:
        source: A folder that `export` wrote, or a timm name with pretrained weights.

    Raises:
        UserError: If it is neither, or the weights cannot be loaded.
    """
    name = f"local-dir:{source}" if is_exported(source) else source
    if name == source and not timm.is_model(source) and not source.startswith("hf-hub:"):
        raise UserError(
            f"{source} is neither a file or folder nor a model of timm's; expected a checkpoint or run of dcvision, "
            "an exported folder, a timm name with pretrained weights."
        )
    if name != source:
        check_exported_config(Path(source) / "config.json")
    with as_user_error(f"{source} has no pretrained weights that can be loaded"):
        return timm.create_model(name, pretrained=True)

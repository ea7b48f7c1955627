"""Loading classifiers that timm can create: exported folders, and timm's pretrained models."""

from pathlib import Path

import timm
from torch import nn

from dctrain.errors import UserError, as_user_error

from .exported_config import check_exported_config


def is_exported(source: str) -> bool:
    """Whether `source` is a folder written by `export`."""
    return (Path(source) / "config.json").is_file()


def load_pretrained(source: str) -> nn.Module:
    """Create a model with its weights.

    Args:
        source: A folder written by `export`, or a timm name with pretrained weights.

    Raises:
        UserError: If the source is unknown, or the weights cannot be loaded.
    """
    name = f"local-dir:{source}" if is_exported(source) else source
    if name == source and not timm.is_model(source) and not source.startswith("hf-hub:"):
        raise UserError(
            f"{source} is not a file, folder or timm model; expected a checkpoint or run of dcvision, "
            "an exported folder, a timm name with pretrained weights."
        )
    if name != source:
        check_exported_config(Path(source) / "config.json")
    with as_user_error(f"the pretrained weights of {source} cannot be loaded"):
        return timm.create_model(name, pretrained=True)

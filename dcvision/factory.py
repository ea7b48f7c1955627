"""Building the model of a run: a timm model by name, optionally with swapped attention."""

import difflib
import math
from typing import Any

import timm
from timm.layers import PatchEmbed
from timm.models import resolve_model_input_args
from torch import nn

from dctrain.errors import UserError, as_user_error

from .models import current_names
from .swap import swap_attention


def build_model(
    name: str | nn.Module, num_classes: int, image_size: int, model_kwargs: dict, swap: dict[str, Any] | None = None
) -> nn.Module:
    """Create a timm model by name, or use a given module, and apply `swap_attention` with the options `swap`.

    Raises:
        UserError: If the name is unknown, or an argument or option is invalid.
    """
    if isinstance(name, nn.Module):
        if model_kwargs:
            raise UserError(f"model_kwargs={model_kwargs} require the name of a model; got a module.")
        with as_user_error(f"swap={swap}"):
            return name if swap is None else swap_attention(name, **current_names(swap))
    _check_sizes(name, image_size, model_kwargs)
    is_saved = name.startswith(("local-dir:", "hf-hub:"))
    if not is_saved and not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=4)
        raise UserError(f"model {name!r} is unknown to timm; close names: {', '.join(close) or 'none'}.")
    if name == "dcmha_swapped":
        raise UserError("model='dcmha_swapped' is for loading only; to train, set the base model and model.swap.")
    if model_kwargs.get("features_only"):
        raise UserError("model_kwargs.features_only=True has no classifier; remove it.")
    with as_user_error(f"model {name!r} cannot be built with {model_kwargs} at {image_size} pixels"):
        arguments = resolve_model_input_args(name, {"img_size": image_size}, num_classes=num_classes, **model_kwargs)
        model = timm.create_model(**arguments)
    _check_patches(model, image_size)
    with as_user_error(f"swap={swap}"):
        return model if swap is None else swap_attention(model, **current_names(swap))


def _check_patches(model: nn.Module, image_size: int) -> None:
    """Check that patches cover the image; the model would ignore remaining rows and columns of pixels.

    Raises:
        UserError: If patches do not cover the image.
    """
    embed = getattr(model, "patch_embed", None)
    if not isinstance(embed, PatchEmbed) or embed.dynamic_img_pad or not isinstance(embed.proj, nn.Conv2d):
        return
    for patch, stride in zip(embed.patch_size, embed.proj.stride, strict=True):
        if patch == stride and image_size % patch:
            raise UserError(f"image_size={image_size} must be a multiple of the model's patch size, {patch}.")


MOST = {"image_size": 8192, "depth": 4096}  # limits far above any model, checked before allocation
MAX_OTHER_SIZES = 2**20


def _check_sizes(name: object, image_size: object, model_kwargs: object) -> None:
    """Check the arguments that determine the memory of a model.

    Raises:
        UserError: If a type is wrong, or a number is unreasonably large.
    """
    if not isinstance(name, str):
        raise UserError(f"model={name!r}: expected the name of a timm model, or a module.")
    if not isinstance(model_kwargs, dict):
        raise UserError(f"model_kwargs={model_kwargs!r}: expected arguments by name.")
    for key, value in {"image_size": image_size, **model_kwargs}.items():
        most = MOST.get(key, MAX_OTHER_SIZES)
        least, values = 1 if key in MOST else -math.inf, value if isinstance(value, list | tuple) else [value]
        if not all(least <= one <= most for one in values if isinstance(one, int | float)):
            raise UserError(f"{key}={value!r}: expected at most {most}" + (", and at least 1." if key in MOST else "."))
        if key.endswith("_rate") and isinstance(value, int | float) and not 0 <= value < 1:
            raise UserError(f"{key}={value!r}: expected a number in [0, 1).")


def without_weights(model_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return arguments that build a timm model without pretrained weights."""
    return {name: value for name, value in (model_kwargs or {}).items() if name != "pretrained"}

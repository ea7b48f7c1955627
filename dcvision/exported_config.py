"""Checks of an exported folder's `config.json`, before timm builds the model."""

import json
from functools import partial
from pathlib import Path

from dctrain.errors import UserError, as_user_error
from dctrain.utils.json_fields import MAX_IMAGE_SIDE, Checks, are_numbers, check_fields, is_count, is_fraction


def check_exported_config(path: Path) -> None:
    """Check values that timm does not check.

    Args:
        path: A `config.json` in timm's format.

    Raises:
        UserError: If it is not a JSON object, or a value is out of range.
    """
    with as_user_error(f"{path} is damaged"):
        content = json.loads(path.read_text())
        values = (content.get("pretrained_cfg") or {}) | {"num_classes": content.get("num_classes")}
    check_fields(path, values, CHECKS)
    channels = (values.get("input_size") or [3])[0]
    for name in ("mean", "std"):
        if values.get(name) is not None and len(values[name]) != channels:
            raise UserError(f"{path}: {name}={values[name]}; expected one number for each of {channels} channels.")


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(is_count(size, most=MAX_IMAGE_SIDE) for size in value)


CHECKS: Checks = {
    "num_classes": (partial(is_count, least=0), "a number of at least 0"),
    "input_size": (_are_sizes, f"[channels, height, width], 1 to {MAX_IMAGE_SIDE} each"),
    "crop_pct": (is_fraction, "a fraction in (0, 1]"),
    "mean": (are_numbers, "finite numbers"),
    "std": (partial(are_numbers, above=0), "positive, finite numbers"),
}

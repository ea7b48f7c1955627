"""What the `config.json` of an exported folder says of a model, checked before timm makes it."""

import json
import math
from collections.abc import Callable
from pathlib import Path

from dctrain.errors import UserError, told_as


def check_exported_config(path: Path) -> None:
    """Check the values that timm takes without a look at them.

    Args:
        path: A `config.json` as timm writes it.

    Raises:
        UserError: If it is no JSON object, or a value is out of range.
    """
    with told_as(f"{path} is damaged"):
        content = json.loads(path.read_text())
        values = {**(content.get("pretrained_cfg") or {}), **{"num_classes": content.get("num_classes")}}
    for name, (accepts, accepted) in CHECKS.items():
        if values.get(name) is not None and not accepts(values[name]):
            raise UserError(f"{path}: {name}={values[name]!r}; accepted: {accepted}.")
    channels = (values.get("input_size") or [3])[0]
    for name in ("mean", "std"):
        if values.get(name) is not None and len(values[name]) != channels:
            raise UserError(f"{path}: {name}={values[name]}; accepted: one number for each of {channels} channels.")


def _are_numbers(value: object, above: float) -> bool:
    """Tell whether a value is a list of finite numbers above a bound."""
    return isinstance(value, list) and all(type(v) in (int, float) and above < v < math.inf for v in value)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(v) is int and 1 <= v <= MOST_PIXELS for v in value)


MOST_PIXELS = 2**14  # of a side
CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "num_classes": (lambda value: type(value) is int and value >= 0, "a number of at least 0"),
    "input_size": (_are_sizes, f"[channels, height, width], 1 to {MOST_PIXELS} each"),
    "crop_pct": (lambda value: type(value) in (int, float) and 0 < value <= 1, "a fraction in (0, 1]"),
    "mean": (lambda value: _are_numbers(value, -math.inf), "finite numbers"),
    "std": (lambda value: _are_numbers(value, 0), "positive, finite numbers"),
}

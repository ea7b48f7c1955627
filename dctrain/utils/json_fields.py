"""Checks of the fields of JSON files: for each field a predicate and a description of the accepted values."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..errors import UserError

MAX_IMAGE_SIDE = 2**14  # maximum side of an image
Checks = Mapping[str, tuple[Callable[[object], bool], str]]


def check_fields(path: Path, content: Mapping, checks: Checks, required: Sequence[str] = ()) -> None:
    """Check fields; a missing field or null is accepted unless it is required.

    Args:
        path: The file, for messages.
        content: Its fields.
        checks: Predicate and description by field name.
        required: Names of required fields.

    Raises:
        UserError: If a value is not accepted.
    """
    for name, (accepts, accepted) in checks.items():
        is_there = content.get(name) is not None
        if (is_there and not accepts(content[name])) or (not is_there and name in required):
            raise UserError(f"{path}: {name}={content.get(name)!r}; expected {accepted}.")


def is_fraction(value: object) -> bool:
    """Whether a value is a number in (0, 1]."""
    return type(value) in (int, float) and 0 < value <= 1


def is_count(value: object, least: int = 1, most: float = math.inf) -> bool:
    """Whether a value is an integer within bounds."""
    return type(value) is int and least <= value <= most


def are_numbers(value: object, above: float = -math.inf) -> bool:
    """Whether a value is a list of finite numbers above a bound."""
    return isinstance(value, list) and all(type(v) in (int, float) and above < v < math.inf for v in value)

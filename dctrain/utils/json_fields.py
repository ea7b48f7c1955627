"""Checks of what JSON files say: each field by a function that accepts its values, and words for what it accepts."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..errors import UserError

MAX_IMAGE_SIDE = 2**14  # of the side of an image
Checks = Mapping[str, tuple[Callable[[object], bool], str]]


def check_fields(path: Path, content: Mapping, checks: Checks, required: Sequence[str] = ()) -> None:
    """Check fields; one that is missing or null is accepted unless it is required.

    Args:
        path: The file, for the message.
        content: Its fields.
        checks: By the name of a field, what accepts its values and what those are in words.
        required: Names of fields that there must be.

    Raises:
        UserError: If a value is not accepted.
    """
    for name, (accepts, accepted) in checks.items():
        is_there = content.get(name) is not None
        if (is_there and not accepts(content[name])) or (not is_there and name in required):
            raise UserError(f"{path}: {name}={content.get(name)!r}; expected {accepted}.")


def is_fraction(value: object) -> bool:
    """Return whether a value is a number in (0, 1]."""
    return type(value) in (int, float) and 0 < value <= 1


def is_count(value: object, least: int = 1, most: float = math.inf) -> bool:
    """Return whether a value is an integer within bounds."""
    return type(value) is int and least <= value <= most


def are_numbers(value: object, above: float = -math.inf) -> bool:
    """Return whether a value is a list of finite numbers above a bound."""
    return isinstance(value, list) and all(type(v) in (int, float) and above < v < math.inf for v in value)

"""Argument checks shared by several entry points: types, which Python does not check, and numbers of loader workers."""

import inspect
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Union, get_args, get_origin

from ..errors import UserError

MAX_WORKERS = 512  # loader workers per rank
ACCEPTS: dict[type, Callable[[object], bool]] = {
    NoneType: lambda value: value is None,
    bool: lambda value: isinstance(value, bool),
    int: lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    float: lambda value: isinstance(value, Real) and not isinstance(value, bool),
    str: lambda value: isinstance(value, str),
}


def check_types(function: Callable, values: Mapping[str, object]) -> None:
    """Check arguments against the annotations of a function's parameters. Only plain types and unions are checked.

    Args:
        function: The function.
        values: Arguments by name.

    Raises:
        UserError: If an argument has the wrong type.
    """
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = parameter.annotation
        kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        is_plain = all(isinstance(kind, type) and kind in ACCEPTS for kind in kinds)  # no choices, lists, mappings
        if name not in values or not is_plain:
            continue
        if not any(ACCEPTS[kind](values[name]) for kind in kinds):
            words = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
            raise UserError(f"{name}={values[name]!r} must be of type {words}.")


def check_workers(num_workers: int) -> None:
    """Check the number of loader workers.

    Raises:
        UserError: If it is negative or unreasonably large.
    """
    if not 0 <= num_workers <= MAX_WORKERS:
        raise UserError(f"num_workers={num_workers}: expected 0 to {MAX_WORKERS}.")

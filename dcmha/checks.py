"""Argument checks shared by the operator and its layers."""

import math
from numbers import Integral, Real

import torch


def is_integer(x: object) -> bool:
    """Whether `x` is an integer, including symbolic integers of a compiler; booleans are not."""
    return isinstance(x, (Integral, torch.SymInt)) and not isinstance(x, bool)


def plain_number(x: Real | None) -> Real | None:
    """Convert numbers of other libraries, such as NumPy, to Python numbers; symbolic numbers are unchanged."""
    if x is None or type(x) in (int, float) or isinstance(x, (torch.SymInt, torch.SymFloat)):
        return x
    return int(x) if isinstance(x, Integral) else float(x)


def check_module(kind: type = torch.nn.Module, **values: object) -> None:
    """Check that arguments, given by name, are modules of type `kind`, possibly compiled.

    Raises:
        TypeError: If one is not.
    """
    for name, value in values.items():
        if not isinstance(getattr(value, "_orig_mod", value), kind):  # set by `torch.compile`
            given = "the class itself" if isinstance(value, type) else f"a value of type {type(value).__name__}"
            raise TypeError(f"{name}: expected a {kind.__module__}.{kind.__qualname__}, not {given}.")


def check_integers(*, least: int = 1, may_be_none: bool = False, **values: object) -> None:
    """Check that arguments, given by name, are integers of at least `least`.

    Raises:
        ValueError: If one is not.
    """
    for name, value in values.items():
        if value is None and may_be_none:
            continue
        if not is_integer(value) or value < least:
            raise ValueError(f"{name}={value!r} must be an integer of at least {least}{' or None' * may_be_none}.")


def check_numbers(*, low: float, high: float = math.inf, **values: object) -> None:
    """Check that arguments, given by name, are finite numbers of at least `low` and below `high`.

    Raises:
        ValueError: If one is not.
    """
    for name, value in values.items():
        if not isinstance(value, Real) or isinstance(value, bool) or not (low <= value < high):
            raise ValueError(f"{name}={value!r} must be a number in [{low:g}, {high:g}).")


def check_booleans(**values: object) -> None:
    """Check that arguments, given by name, are booleans.

    Raises:
        ValueError: If one is not.
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be of type bool.")


def check_factory(device: object, dtype: object, norm_layer: object = None) -> None:
    """Check the device, dtype and norm layer of a module.

    Raises:
        ValueError: If `dtype` is not floating, `device` is not a device, or `norm_layer` is not callable.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype={dtype!r} must be a floating torch.dtype, or None.")
    if norm_layer is not None and not callable(norm_layer):
        raise ValueError(f"norm_layer={norm_layer!r} must be a constructor, such as torch.nn.LayerNorm, or None.")
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} must be a torch.device, its name, or None.") from error

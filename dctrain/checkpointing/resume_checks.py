"""Checks of a resumed run: changed settings, and the state of the optimizer."""

from collections.abc import Mapping

import torch

from ..errors import UserError


def changed_settings(before: Mapping[str, object], now: Mapping[str, object], prefix: str = "") -> list[str]:
    """Describe changed settings, with both values."""
    return [
        f"{prefix}{name} {before[name]!r} -> {now[name]!r}"
        for name in before
        if name in now and stored_form(before[name]) != stored_form(now[name])
    ]


def stored_form(value: object) -> object:
    """Convert a setting to the form in which a checkpoint stores it."""
    return list(value) if isinstance(value, tuple) else value


def check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Check an optimizer state loaded from a checkpoint.

    Raises:
        UserError: If a tensor is missing, or its shape differs from its parameter's.
    """
    for parameter, state in optimizer.state.items():
        for name in ("exp_avg", "exp_avg_sq"):
            found = getattr(state.get(name), "shape", None) if isinstance(state, Mapping) else None
            if found != parameter.shape:
                shapes = f"{None if found is None else list(found)}, not {list(parameter.shape)}"
                raise UserError(f"the checkpoint cannot be resumed: {name} of a parameter is of shape {shapes}.")
        if not torch.is_tensor(state.get("step")):
            raise UserError("the checkpoint cannot be resumed: the optimizer's step of a parameter is missing.")

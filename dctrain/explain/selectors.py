"""Finding what a user names: layers, positions, kinds of parts."""

from collections.abc import Sequence

from torch import nn

from dcmha import DCCrossAttention
from dcmha.analysis import attention_layers, composed_layers

from ..errors import UserError


def find_layer(model: nn.Module, layer: str | None, composition: str) -> list[str]:
    """Find the self-attention layers that compose, or the one of a name or a number.

    Args:
        model: Where they are.
        layer: Name, or number among all attention layers; None for all that compose.
        composition: "pre" or "post", which they must have.

    Raises:
        ValueError: If there is none.
    """
    composed = {name: one for name, one in composed_layers(model).items() if not isinstance(one, DCCrossAttention)}
    found = [name for name, one in composed.items() if composition in one.options.compositions]
    if not found:
        raise ValueError(f"{type(model).__name__} has no {composition}-composition.")
    if layer is None:
        return found
    names = list(attention_layers(model))
    name = names[int(layer)] if layer.isdecimal() and int(layer) < len(names) else layer
    if name not in names:
        raise ValueError(f"layer={layer}; expected 0 to {len(names) - 1}, or one of {', '.join(names)}.")
    if name not in found:
        raise ValueError(f"layer={layer} has no {composition}-composition; expected {', '.join(found)}.")
    return [name]


def is_composed(model: nn.Module) -> bool:
    """Tell whether a model composes heads anywhere; say so if it does not."""
    try:
        return bool(composed_layers(model))
    except ValueError:
        print("plain attention: there is no composition to look at")
        return False


def find_position(name: str, position: int, count: int) -> int:
    """Check a position in a sequence, of which negative ones count from the end.

    Raises:
        UserError: If it is outside.
    """
    if not -count <= position < count:
        raise UserError(f"{name}={position}; expected {-count} to {count - 1}, the tokens.")
    return position % count


def check_kinds(name: str, given: Sequence[str], accepted: Sequence[str]) -> None:
    """Check that at least one of some words is given, none of them twice.

    Raises:
        UserError: If not.
    """
    if not given or set(given) - set(accepted) or len(set(given)) < len(given):
        raise UserError(f"{name}={list(given)}; expected one or more of {', '.join(accepted)}.")

"""Selection of layers, positions and kinds of parts by command-line arguments."""

from collections.abc import Sequence

from torch import nn

from dcmha import DCCrossAttention
from dcmha.analysis import attention_layers, composed_layers

from ..errors import UserError


def find_layer(model: nn.Module, layer: str | None, composition: str) -> list[str]:
    """Return the names of the composed self-attention layers, or of a selected one.

    Args:
        model: The model.
        layer: Name, or index among all attention layers; None for all composed layers.
        composition: Required composition, "pre" or "post".

    Raises:
        ValueError: If there is no such layer.
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
    """Whether a model composes heads; print a message if not."""
    try:
        return bool(composed_layers(model))
    except ValueError:
        print("plain attention: the model has no composition")
        return False


def find_position(name: str, position: int, count: int) -> int:
    """Check a position in a sequence; negative positions count from the end.

    Raises:
        UserError: If it is out of range.
    """
    if not -count <= position < count:
        raise UserError(f"{name}={position}; expected {-count} to {count - 1}, the tokens.")
    return position % count


def check_kinds(name: str, given: Sequence[str], accepted: Sequence[str]) -> None:
    """Check that kinds are accepted, distinct, and at least one.

    Raises:
        UserError: If not.
    """
    if not given or set(given) - set(accepted) or len(set(given)) < len(given):
        raise UserError(f"{name}={list(given)}; expected one or more of {', '.join(accepted)}.")

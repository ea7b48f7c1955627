"""Finding layers and positions that a user names."""

from torch import nn

from dcmha import ComposedLayer

from ..errors import UserError


def find_layer(model: nn.Module, layer: str | None, composition: str) -> list[str]:
    """Find the layers that compose, or the one of a name or a number.

    Args:
        model: Where they are.
        layer: Name, or number among all layers that compose; None for all.
        composition: "pre" or "post", which they must have.

    Raises:
        ValueError: If there is none.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ComposedLayer)}
    found = [name for name, module in layers.items() if composition in module.options.compositions]
    if not found:
        raise ValueError(f"{type(model).__name__} has no {composition}-composition.")
    if layer is None:
        return found
    name = found[int(layer)] if layer.isdigit() and int(layer) < len(found) else layer
    if name not in found:
        raise ValueError(f"layer={layer}; accepted: 0 to {len(found) - 1}, or one of {', '.join(found)}.")
    return [name]


def find_position(name: str, position: int, count: int) -> int:
    """Check a position in a sequence, of which negative ones count from the end.

    Raises:
        UserError: If it is outside.
    """
    if not -count <= position < count:
        raise UserError(f"{name}={position}; accepted: {-count} to {count - 1}, the tokens.")
    return position % count

"""Initial weights of a run (`fit --init`): comparison with the model's parameters."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from ..errors import UserError

NUM_NAMED = 3  # maximum tensors of a kind named in a message


def check_initial(
    source: str, given: Mapping[str, Tensor], model: nn.Module, may_be_drawn: Callable[[str], bool]
) -> list[str]:
    """Compare initial weights with the parameters of a model.

    Args:
        source: Name of the weights in messages.
        given: The weights.
        model: The model.
        may_be_drawn: Whether a parameter, by name, may be missing and keep its random initialization.

    Returns:
        Names of the missing parameters, which keep their random initialization.

    Raises:
        UserError: If others are missing, some are unknown, or shapes differ.
    """
    ours = model.state_dict()
    missing = [name for name in ours if name not in given]
    problems = {
        "missing": [name for name in missing if not may_be_drawn(name)],
        "unknown": [name for name in given if name not in ours],
        "of a different shape": [
            f"{name} {list(given[name].shape)}, here {list(ours[name].shape)}"
            for name in ours
            if name in given and given[name].shape != ours[name].shape
        ],
    }
    message = [
        f"{len(names)} are {kind} ({', '.join(names[:NUM_NAMED])}{', ...' if len(names) > NUM_NAMED else ''})"
        for kind, names in problems.items()
        if names
    ]
    if message:
        raise UserError(f"init={source} does not match the model: of its tensors {'; '.join(message)}.")
    return missing


def is_of_composition(name: str) -> bool:
    """Whether a parameter, by name, belongs to a composition, which plain models lack."""
    return ".compose." in name

"""Starting from weights: `fit --init`. What must be there, what is drawn anew, and what does not fit."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from ..errors import UserError

NUM_NAMED = 3  # tensors of a kind that a message names


def check_initial(
    source: str, given: Mapping[str, Tensor], model: nn.Module, may_be_drawn: Callable[[str], bool]
) -> list[str]:
    """Compare the weights that a model is to start from with its own.

    Args:
        source: What the messages call the weights.
        given: The weights.
        model: The model.
        may_be_drawn: Tells of a parameter's name whether it may be missing.

    Returns:
        The names that are missing, which stay as they are drawn.

    Raises:
        UserError: If others are missing, some are unknown, or shapes differ.
    """
    ours = model.state_dict()
    missing = [name for name in ours if name not in given]
    problems = {
        "missing": [name for name in missing if not may_be_drawn(name)],
        "unknown": [name for name in given if name not in ours],
        "of another shape": [
            f"{name} {list(given[name].shape)}, here {list(ours[name].shape)}"
            for name in ours
            if name in given and given[name].shape != ours[name].shape
        ],
    }
    said = [
        f"{len(names)} are {kind} ({', '.join(names[:NUM_NAMED])}{', ...' if len(names) > NUM_NAMED else ''})"
        for kind, names in problems.items()
        if names
    ]
    if said:
        raise UserError(f"init={source} does not fit the model: of its tensors {'; '.join(said)}.")
    return missing


def is_of_composition(name: str) -> bool:
    """Tell whether a parameter belongs to composition, which a plain model lacks."""
    return ".compose." in name

"""How many optimiser steps a run has."""

from .errors import UserError


def is_set(number: int | None) -> bool:
    """Return whether a trainer's number of steps or epochs bounds the run: -1 and None do not."""
    return number is not None and number > 0


def count_run_steps(max_steps: int | None, max_epochs: int | None, steps_per_epoch: int | None) -> int | None:
    """Count the optimiser steps of a run, which ends at whichever bound it reaches first.

    Args:
        max_steps: The trainer's bound on optimiser steps.
        max_epochs: The trainer's bound on epochs.
        steps_per_epoch: Optimiser steps of an epoch; None if they are not known.

    Returns:
        The steps; None if epochs alone bound the run and their steps are not known.

    Raises:
        UserError: If nothing bounds the run.
    """
    if not is_set(max_steps) and not is_set(max_epochs):
        raise UserError("the run has no end, which the schedule needs: set trainer.max_epochs or trainer.max_steps.")
    steps = [max_steps] if is_set(max_steps) else []
    if is_set(max_epochs) and steps_per_epoch is not None:
        steps.append(max_epochs * steps_per_epoch)
    return min(steps, default=None)

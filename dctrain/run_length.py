"""Number of optimizer steps of a run."""

from .errors import UserError


def is_set(number: int | None) -> bool:
    """Whether a trainer's number of steps or epochs limits the run: -1 and None do not."""
    return number is not None and number > 0


def count_run_steps(max_steps: int | None, max_epochs: int | None, steps_per_epoch: int | None) -> int | None:
    """Count the optimizer steps of a run, which ends at the first limit.

    Args:
        max_steps: The trainer's limit of optimizer steps.
        max_epochs: The trainer's limit of epochs.
        steps_per_epoch: Optimizer steps per epoch; None if unknown.

    Returns:
        The steps; None if only epochs limit the run and their steps are unknown.

    Raises:
        UserError: If the run has no limit.
    """
    if not is_set(max_steps) and not is_set(max_epochs):
        raise UserError(
            "the run has no limit, which the schedule requires: set trainer.max_epochs or trainer.max_steps."
        )
    steps = [max_steps] if is_set(max_steps) else []
    if is_set(max_epochs) and steps_per_epoch is not None:
        steps.append(max_epochs * steps_per_epoch)
    return min(steps, default=None)

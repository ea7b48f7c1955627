"""Errors that users can correct, and the conversion of other libraries' errors to them.

The command line prints their message without a stack trace.
"""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

MAX_CHARACTERS = 2000  # of a message, because a parser may quote a whole file


class UserError(Exception):
    """The configuration, the data or a checkpoint is invalid; the message says what is expected."""


class DivergenceError(UserError):
    """Training was stopped because of non-finite numbers.

    Args:
        message: The non-finite quantity and the step.
        checkpoint: The last checkpoint with finite weights; None if there is none.
    """

    def __init__(self, message: str, checkpoint: Path | None = None) -> None:
        super().__init__(message)
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        kept = "" if self.checkpoint is None else f" The last finite checkpoint: {self.checkpoint}"
        return f"{super().__str__()}{kept}"


class RunStopped(BaseException):
    """Ends a run after a signal, when its checkpoint is saved. A `BaseException`, so that only the command line catches
    it.

    Args:
        signum: The received signal.
        checkpoint: Checkpoint to resume from; None if training has not started.
    """

    def __init__(self, signum: int, checkpoint: Path | None) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.checkpoint = checkpoint


@contextmanager
def as_user_error(
    what: str | None = None, of: type[Exception] | tuple[type[Exception], ...] = Exception
) -> Iterator[None]:
    """Convert errors of the body to a `UserError` with the message "WHAT: reason", or only the reason.

    Args:
        what: Description of the failed operation.
        of: Exception types to convert; all by default, for bodies in which every error is caused by user input.
    """
    try:
        yield
    except UserError:
        raise
    except of as error:
        message = reason(error)
        raise UserError(message if what is None else f"{what}: {message}") from error


def is_of_another_rank(error: BaseException) -> bool:
    """Whether an error of torch.distributed is caused by the loss of another process."""
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


def reason(error: BaseException) -> str:
    """Return a one-line description of an error."""
    if is_of_another_rank(error):
        return "another process of this run has died or cannot be reached; see its output. Continue with --resume."
    if isinstance(error, ConnectionError) and error.strerror:
        return f"{error.strerror}: a loader worker has died (out of memory?), or a server is unreachable"
    if isinstance(error, OSError) and error.strerror:
        named = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return ": ".join([error.strerror, " -> ".join(named)]) if named else error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, KeyError):
        return f"missing {lines[0]}"
    if re.match(r"Caught \w+ in ", lines[0]):  # error of a loader worker: the message follows the stack trace
        return re.sub(r"^[\w.]*(Error|Exception|BadImage): ", "", lines[-1])
    message = " ".join(lines)
    return message if len(message) <= MAX_CHARACTERS else f"{message[:MAX_CHARACTERS]} ..."

"""The exceptions that a user can do something about, and the one place where other libraries' errors become them.

The command line prints their message, in one line, without a stack trace.
"""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

MAX_CHARACTERS = 2000  # of a message: a parser may quote a whole file


class UserError(Exception):
    """Something in the configuration, the data or a checkpoint is not as it must be; the message says what."""


class DivergenceError(UserError):
    """Training came to numbers that are not finite, and was ended.

    Args:
        message: What was not finite, and when.
        checkpoint: The last checkpoint of finite weights; None if there is none.
    """

    def __init__(self, message: str, checkpoint: Path | None = None) -> None:
        super().__init__(message)
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        kept = "" if self.checkpoint is None else f" The last finite checkpoint: {self.checkpoint}"
        return f"{super().__str__()}{kept}"


class RunStopped(BaseException):
    """Ends a run after a signal, once its checkpoint is saved. It is a `BaseException`, which the command line alone
    catches.

    Args:
        signum: The signal that asked for it.
        checkpoint: Where the run can be taken up; None if it has not begun.
    """

    def __init__(self, signum: int, checkpoint: Path | None) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.checkpoint = checkpoint


@contextmanager
def as_user_error(
    what: str | None = None, of: type[Exception] | tuple[type[Exception], ...] = Exception
) -> Iterator[None]:
    """Turn errors of the body into a `UserError`: "WHAT: the reason", or the reason alone.

    Args:
        what: What cannot be done.
        of: Which errors; by default all, for a few lines whose errors can have no other cause than what a user gave.
    """
    try:
        yield
    except UserError:
        raise
    except of as error:
        said = reason(error)
        raise UserError(said if what is None else f"{what}: {said}") from error


def is_of_another_rank(error: BaseException) -> bool:
    """Tell whether an error is torch's that a process group has lost a process."""
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


def reason(error: BaseException) -> str:
    """Say in one line what an error is about."""
    if is_of_another_rank(error):
        return "another process of this run has died or cannot be reached; what it wrote says why, --resume goes on."
    if isinstance(error, ConnectionError) and error.strerror:
        return f"{error.strerror}: a loader process has died (of memory?), or a server is gone"
    if isinstance(error, OSError) and error.strerror:
        named = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return ": ".join([error.strerror, " -> ".join(named)]) if named else error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, KeyError):
        return f"it has no {lines[0]}"
    if re.match(r"Caught \w+ in ", lines[0]):  # an error of a loader process: its message stands behind its stack
        return re.sub(r"^[\w.]*(Error|Exception|BadImage): ", "", lines[-1])
    said = " ".join(lines)
    return said if len(said) <= MAX_CHARACTERS else f"{said[:MAX_CHARACTERS]} ..."

"""The exceptions that a user can do something about. The command line prints their message without a stack trace."""

from pathlib import Path


class UserError(Exception):
    """Something in the configuration, the data or a checkpoint is not as it must be; the message says what."""


class Diverged(UserError):
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

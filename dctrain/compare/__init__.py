"""Training several models with one recipe, over seeds, and telling what came out: `compare` of both trainers."""

from .command import compare_command

__all__ = ["compare_command"]

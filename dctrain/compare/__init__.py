"""`compare`: training several models with one recipe over several seeds, and reporting the results."""

from .command import compare_command

__all__ = ["compare_command"]

"""What both trainers' `explain` share: measurements of heads and compositions, their tables and pictures."""

from .diversity import diversity_command

__all__ = ["diversity_command"]

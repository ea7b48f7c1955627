"""What both trainers' `explain` share: measurements of heads and compositions, their tables and pictures."""

from .composition_scalars import CompositionScalars
from .diversity import diversity_command

__all__ = ["CompositionScalars", "diversity_command"]

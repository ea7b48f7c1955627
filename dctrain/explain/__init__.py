"""Common parts of `explain`: measurements of heads and compositions, their tables and figures."""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_exports
from .diversity import diversity_command

if TYPE_CHECKING:
    from .composition_scalars import CompositionScalars

__all__ = ["CompositionScalars", "diversity_command"]
__getattr__, __dir__ = lazy_exports(__name__, {"CompositionScalars": "composition_scalars"})

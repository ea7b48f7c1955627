"""What trained towers are used for: one module for each command."""

from .caption import caption
from .classify import classify
from .embed import embed
from .look import look
from .retrieve import retrieve

__all__ = ["caption", "classify", "embed", "look", "retrieve"]

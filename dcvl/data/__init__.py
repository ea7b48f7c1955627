"""Images with captions."""

from .datamodule import CaptionDataModule
from .samples import Batch

__all__ = ["Batch", "CaptionDataModule"]

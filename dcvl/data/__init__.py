"""Images with captions."""

from typing import TYPE_CHECKING

from dctrain.utils.lazy import lazy_exports

from .samples import CaptionBatch

if TYPE_CHECKING:
    from .datamodule import CaptionDataModule

__all__ = ["CaptionBatch", "CaptionDataModule"]
__getattr__, __dir__ = lazy_exports(__name__, {"CaptionDataModule": "datamodule"})

"""Images with captions."""

from typing import TYPE_CHECKING

from dctrain.utils.lazy import lazily

from .samples import Batch

if TYPE_CHECKING:
    from .datamodule import CaptionDataModule

__all__ = ["Batch", "CaptionDataModule"]
__getattr__, __dir__ = lazily(__name__, {"CaptionDataModule": "datamodule"})

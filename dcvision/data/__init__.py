"""Data for image classification: sources, order, decoding, and the LightningDataModule that joins them."""

from typing import TYPE_CHECKING

from dctrain.utils.lazy import lazily

from .samples import IGNORED, Batch

if TYPE_CHECKING:
    from .datamodule import ImageDataModule

__all__ = ["IGNORED", "Batch", "ImageDataModule"]
__getattr__, __dir__ = lazily(__name__, {"ImageDataModule": "datamodule"})

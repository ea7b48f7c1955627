"""Data for image classification: sources, decoding, augmentation, and the LightningDataModule."""

from typing import TYPE_CHECKING

from dctrain.utils.lazy import lazy_exports

from .samples import IGNORED, ImageBatch

if TYPE_CHECKING:
    from .datamodule import ImageDataModule

__all__ = ["IGNORED", "ImageBatch", "ImageDataModule"]
__getattr__, __dir__ = lazy_exports(__name__, {"ImageDataModule": "datamodule"})

"""Data for image classification: sources, order, decoding, and the LightningDataModule that joins them."""

from .datamodule import ImageDataModule
from .samples import IGNORED, Batch

__all__ = ["IGNORED", "Batch", "ImageDataModule"]

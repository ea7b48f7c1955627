"""Data for language models: texts, tokenizers, token files, and the LightningDataModule that joins them."""

from .datamodule import TokenDataModule
from .samples import Batch

__all__ = ["Batch", "TokenDataModule"]

"""Data for language models: texts, tokenizers, token files, and the LightningDataModule that joins them."""

from typing import TYPE_CHECKING

from dctrain.utils.lazy import lazily

from .samples import Batch

if TYPE_CHECKING:
    from .datamodule import TokenDataModule

__all__ = ["Batch", "TokenDataModule"]
__getattr__, __dir__ = lazily(__name__, {"TokenDataModule": "datamodule"})

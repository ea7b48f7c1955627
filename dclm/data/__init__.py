"""Data for language models: texts, tokenizers, token files, and the LightningDataModule."""

from typing import TYPE_CHECKING

from dctrain.utils.lazy import lazy_exports

from .samples import TokenBatch

if TYPE_CHECKING:
    from .datamodule import TokenDataModule

__all__ = ["TokenBatch", "TokenDataModule"]
__getattr__, __dir__ = lazy_exports(__name__, {"TokenDataModule": "datamodule"})

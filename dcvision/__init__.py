"""Image classification with DCMHA. Importing this package registers the `dcvit_*` and `mhavit_*` models with timm."""

from typing import TYPE_CHECKING

from dctrain.utils.lazy import lazy_exports

from . import models
from .swap import swap_attention

if TYPE_CHECKING:
    from .classifier import ImageClassifier
    from .data import ImageDataModule

__all__ = ["ImageClassifier", "ImageDataModule", "models", "swap_attention"]
__getattr__, __dir__ = lazy_exports(__name__, {"ImageClassifier": "classifier", "ImageDataModule": "data.datamodule"})

"""Image classification with DCMHA. Importing this package registers the `dcvit_*` and `mhavit_*` models with timm."""

from . import models
from .classifier import ImageClassifier
from .data import ImageDataModule
from .swap import swap_attention

__all__ = ["ImageClassifier", "ImageDataModule", "models", "swap_attention"]

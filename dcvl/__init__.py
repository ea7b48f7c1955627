"""Images and texts with DCMHA: contrastive and captioning training of two towers."""

from .data import CaptionDataModule
from .network import ImageText
from .vision_language_model import VisionLanguageModel

__all__ = ["CaptionDataModule", "ImageText", "VisionLanguageModel"]

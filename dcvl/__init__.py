"""Vision-language models with DCMHA: contrastive and captioning training of an image and a text tower."""

from typing import TYPE_CHECKING

from dctrain.utils.lazy import lazy_exports

from .network import ImageText

if TYPE_CHECKING:
    from .data import CaptionDataModule
    from .vision_language_model import VisionLanguageModel

__all__ = ["CaptionDataModule", "ImageText", "VisionLanguageModel"]
__getattr__, __dir__ = lazy_exports(
    __name__, {"CaptionDataModule": "data.datamodule", "VisionLanguageModel": "vision_language_model"}
)

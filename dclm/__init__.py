"""Decoder language models with DCMHA: models, training, generation, and the published checkpoints."""

from .config import CONFIGS, DecoderConfig, decoder_config
from .data import TokenDataModule
from .decoder import Decoder
from .generate import generate
from .hub import load_pretrained, save_pretrained
from .language_model import LanguageModel

__all__ = [
    "CONFIGS",
    "Decoder",
    "DecoderConfig",
    "LanguageModel",
    "TokenDataModule",
    "decoder_config",
    "generate",
    "load_pretrained",
    "save_pretrained",
]

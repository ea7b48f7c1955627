"""Decoder language models with DCMHA: models, training, generation, and the published checkpoints."""

from .config import CONFIGS, DecoderConfig, decoder_config
from .decoder import Decoder
from .generate import generate
from .hub import load_pretrained, save_pretrained

__all__ = [
    "CONFIGS",
    "Decoder",
    "DecoderConfig",
    "decoder_config",
    "generate",
    "load_pretrained",
    "save_pretrained",
]

"""Decoder language models with DCMHA: models, training, generation, and the published checkpoints."""

from .beams import beam_search
from .config import CONFIGS, DecoderConfig, decoder_config
from .data import TokenDataModule
from .decoder import Decoder
from .generate import generate
from .hub import load_pretrained, save_pretrained
from .language_model import LanguageModel
from .likelihood import cut_left, encode_pairs, log_likelihoods
from .load import load_model
from .swap import swap_attention

__all__ = [
    "CONFIGS",
    "Decoder",
    "DecoderConfig",
    "LanguageModel",
    "TokenDataModule",
    "beam_search",
    "cut_left",
    "decoder_config",
    "encode_pairs",
    "generate",
    "load_model",
    "load_pretrained",
    "log_likelihoods",
    "save_pretrained",
    "swap_attention",
]

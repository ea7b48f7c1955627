"""Decoder language models with DCMHA: models, training, generation, and the published checkpoints."""

from typing import TYPE_CHECKING

from dctrain.utils.lazy import lazy_exports

from .beam_search import beam_search
from .config import CONFIGS, DecoderConfig, decoder_config
from .decoder import Decoder
from .generate import generate
from .hub import load_pretrained, save_pretrained
from .likelihood import cut_left, encode_pairs, log_likelihoods
from .load import load_model
from .swap import swap_attention

if TYPE_CHECKING:
    from .data import TokenDataModule
    from .language_model import LanguageModel

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
__getattr__, __dir__ = lazy_exports(__name__, {"LanguageModel": "language_model", "TokenDataModule": "data.datamodule"})

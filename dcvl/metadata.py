"""Fields of the `config.json` of exported models."""

from functools import partial
from typing import get_args

from dclm.config import MOST
from dctrain.utils.json_fields import MAX_IMAGE_SIDE, Checks, are_numbers, is_count, is_fraction

from .contrastive import Contrastive


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


FIELDS: Checks = {
    "image_size": (partial(is_count, most=MAX_IMAGE_SIDE), f"1 to {MAX_IMAGE_SIDE}"),
    "context_length": (partial(is_count, most=MOST["context_length"]), f"1 to {MOST['context_length']}"),
    "embed_dim": (partial(is_count, most=MOST["dim"]), f"1 to {MOST['dim']}, or null"),
    "contrastive": (
        lambda value: value in get_args(Contrastive),
        f"{', '.join(map(repr, get_args(Contrastive)))}, or null",
    ),
    "templates": (_are_texts, "a list of sentences"),
    "crop_fraction": (is_fraction, "a fraction in (0, 1]"),
    "hide_images": (lambda value: isinstance(value, bool), "true or false"),
    "tokenizer": (lambda value: isinstance(value, str), "the name of a file, or 'bytes'"),
    "mean": (lambda value: are_numbers(value) and len(value) == 3, "three finite numbers"),
    "std": (lambda value: are_numbers(value, above=0) and len(value) == 3, "three positive, finite numbers"),
}
REQUIRED = ("image_size", "context_length", "templates", "crop_fraction", "tokenizer", "mean", "std")

"""Loading classifiers with their preprocessing: runs, exported folders, and timm's pretrained models."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from timm.data import create_transform, resolve_data_config
from torch import Tensor, nn
from torchvision.transforms.v2.functional import normalize, to_pil_image

from dctrain.checkpointing.checkpoint import find_checkpoint, map_checkpoint
from dctrain.errors import as_user_error

from ..compat_checks import normalization
from ..data.decode import Transform, decode, eval_transform
from ..export import load_network
from ..pretrained import is_exported, load_pretrained


class Classifier(NamedTuple):
    """A classifier with its preprocessing.

    Attributes:
        model: Returns logits [B, classes] for images [B, 3, size, size].
        prepare: Preprocesses an encoded or decoded image to [3, size, size].
        preprocessing: Description of `prepare`.
        classes: Names of the classes; None if unknown.
    """

    model: nn.Module
    prepare: Callable[[bytes | Tensor], Tensor]
    preprocessing: dict
    classes: list[str] | None


def load_classifier(checkpoint: str) -> Classifier:
    """Load a classifier.

    Args:
        checkpoint: A .ckpt file or run of `dcvision fit` (with its averaged weights, if any, and its preprocessing), a
            folder written by `export`, or a timm name with pretrained weights (with timm's preprocessing).

    Raises:
        UserError: If it cannot be loaded.
    """
    if Path(checkpoint).exists() and not is_exported(checkpoint):
        return _of_run(checkpoint)
    model = load_pretrained(checkpoint).eval()
    with as_user_error(f"{checkpoint}: invalid preprocessing in its pretrained_cfg"):
        config = resolve_data_config({}, model=model)
        transform = create_transform(**config)
    words = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
    classes = (getattr(model, "pretrained_cfg", None) or {}).get("label_names")
    return Classifier(model, partial(_by_timm, transform), {"by": "timm", **words}, classes)


def _of_run(checkpoint: str) -> Classifier:
    model, size, classes = load_network(checkpoint)
    data = map_checkpoint(find_checkpoint(checkpoint)).get("datamodule_hyper_parameters", {})
    fraction = data.get("crop_fraction", 1.0)
    transform = eval_transform(size, fraction)
    scales = normalization(model)
    words = {"by": "dcvision", "size": size, "crop_fraction": fraction, **scales}
    return Classifier(model.eval(), partial(as_in_training, transform, *scales.values()), words, classes)


def _by_timm(transform: Callable[[Image.Image], Tensor], image: bytes | Tensor) -> Tensor:
    return transform(_as_pil(image))


def as_in_training(transform: Transform, mean: list[float], std: list[float], image: bytes | Tensor) -> Tensor:
    """Preprocess an encoded or decoded image as in training: transformed and normalized [3, size, size]."""
    pixels = decode(image) if isinstance(image, bytes) else image
    return normalize(transform(pixels).float() / 255, mean, std)


def _as_pil(image: bytes | Tensor) -> Image.Image:
    if isinstance(image, Tensor):
        return to_pil_image(image)
    with Image.open(io.BytesIO(image)) as opened:
        return opened.convert("RGB")

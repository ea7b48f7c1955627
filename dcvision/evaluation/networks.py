"""Any classifier with the preprocessing it was made for: of a run, of an exported folder, or timm's own."""

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

from ..compat_checks import normalisation
from ..data.decode import Transform, decode, eval_transform
from ..export import load_network
from ..pretrained import is_exported, load_pretrained


class Classifier(NamedTuple):
    """A classifier.

    Attributes:
        model: Gives logits [B, classes] for images [B, 3, size, size].
        prepare: Makes such an image, [3, size, size], of an encoded or a decoded one.
        preprocessing: What `prepare` does, in words and numbers.
        classes: Names of the classes; None if they are not known.
    """

    model: nn.Module
    prepare: Callable[[bytes | Tensor], Tensor]
    preprocessing: dict
    classes: list[str] | None


def load_classifier(checkpoint: str) -> Classifier:
    """Load a classifier.

    Args:
        checkpoint: A .ckpt file or run of `dcvision fit` (its average, if it kept one, and its own preprocessing), a
            folder that `export` wrote, or a timm name with pretrained weights (timm's preprocessing).

    Raises:
        UserError: If there is none.
    """
    if Path(checkpoint).exists() and not is_exported(checkpoint):
        return _of_run(checkpoint)
    model = load_pretrained(checkpoint).eval()
    with as_user_error(f"{checkpoint}: its pretrained_cfg does not describe a preprocessing"):
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
    scales = normalisation(model)
    words = {"by": "dcvision", "size": size, "crop_fraction": fraction, **scales}
    return Classifier(model.eval(), partial(as_in_training, transform, *scales.values()), words, classes)


def _by_timm(transform: Callable[[Image.Image], Tensor], image: bytes | Tensor) -> Tensor:
    return transform(_as_pil(image))


def as_in_training(transform: Transform, mean: list[float], std: list[float], image: bytes | Tensor) -> Tensor:
    """Make of an image, encoded or decoded, what training made of it: transformed and normalised [3, size, size]."""
    pixels = decode(image) if isinstance(image, bytes) else image
    return normalize(transform(pixels).float() / 255, mean, std)


def _as_pil(image: bytes | Tensor) -> Image.Image:
    if isinstance(image, Tensor):
        return to_pil_image(image)
    with Image.open(io.BytesIO(image)) as opened:
        return opened.convert("RGB")

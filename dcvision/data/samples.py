"""Samples and batches of uint8 images: decoding, augmentation, collation, and reporting of unreadable images."""

# B batch

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dctrain.data.sampler import SampleRef
from dctrain.errors import UserError, reason

from .decode import BadImage, Transform, decode, sample_rng
from .sources import Source

IGNORED = -100  # label of padding samples; the default ignore_index of cross_entropy


class ImageBatch(NamedTuple):
    """A batch: images uint8 [B, 3, size, size], labels int64 [B], names, and unreadable images as (name, reason).

    If no image could be read, the batch has one black image with label -100, and `names` is empty.
    """

    images: Tensor
    labels: Tensor
    names: list[str]
    skipped: list[tuple[str, str]]


def as_batch(batch: ImageBatch | Sequence[Tensor]) -> ImageBatch:
    """Convert a batch of other loaders, (images, labels)."""
    if isinstance(batch, ImageBatch):
        return batch
    if not isinstance(batch, list | tuple) or len(batch) != 2 or not all(isinstance(x, Tensor) for x in batch):
        got = type(batch).__name__
        raise UserError(f"the batch is {got}: expected a pair of tensors, (images, labels).")
    images, labels = batch
    return ImageBatch(images, labels, [""] * len(labels), [])


class SkippedSample(NamedTuple):
    """Placeholder of an unreadable image, sent to the main process."""

    name: str
    reason: str


class ImageSamples(Dataset):
    """Decoded and transformed samples of a source.

    Args:
        source: Source of encoded images.
        transform: uint8 [3, H, W] -> uint8 [3, size, size].
        seed: Seed of the run; augmentation draws from (seed, epoch, index).
        max_pixels: As in `decode`.
    """

    def __init__(self, source: Source, transform: Transform, seed: int, max_pixels: int) -> None:
        self.source, self.transform, self.seed, self.max_pixels = source, transform, seed, max_pixels

    def __getitem__(self, ref: SampleRef) -> tuple[Tensor, int, str] | SkippedSample:
        name = self.source.name(ref.index)
        try:
            image, label = self.source.read(ref.index)
        except OSError as error:  # a removed file, or a disk error
            return SkippedSample(name, reason(error))
        made = make_image(image, name, self.transform, self.max_pixels, self.seed, ref.epoch, ref.index)
        if isinstance(made, SkippedSample):
            return made
        return made, IGNORED if ref.is_padding else label, name


def make_image(
    image: bytes | Tensor, name: str, transform: Transform, max_pixels: int, *key: int
) -> Tensor | SkippedSample:
    """Decode and transform one image with the random choices of `key`."""
    try:
        decoded = image if isinstance(image, Tensor) else decode(image, max_pixels)
    except BadImage as error:
        return SkippedSample(name, str(error))
    with sample_rng(*key):
        return transform(decoded)


class Collate:
    """Stacks readable samples; a batch can be smaller than the batch size.

    Args:
        image_size: Side of the images.
    """

    def __init__(self, image_size: int) -> None:
        self.image_size = image_size

    def __call__(self, samples: list[tuple[Tensor, int, str] | SkippedSample]) -> ImageBatch:
        good = [sample for sample in samples if not isinstance(sample, SkippedSample)]
        skipped = [tuple(sample) for sample in samples if isinstance(sample, SkippedSample)]
        if not good:
            black = torch.zeros(1, 3, self.image_size, self.image_size, dtype=torch.uint8)
            return ImageBatch(black, torch.tensor([IGNORED]), [], skipped)
        images, labels, names = zip(*good, strict=True)
        return ImageBatch(torch.stack(images), torch.tensor(labels), list(names), skipped)

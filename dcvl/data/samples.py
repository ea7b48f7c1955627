"""Samples and batches of images with tokenized captions."""

# B images, M texts, T tokens

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dclm.data.tokenizers import Tokenizer
from dclm.loss import IGNORED
from dctrain.data.sampler import SampleRef
from dctrain.errors import as_user_error, reason
from dcvision.data.decode import Transform
from dcvision.data.samples import SkippedSample, make_image

from ..network import Texts
from .captions import CaptionSource


class EncodedCaption(NamedTuple):
    """A tokenized caption.

    Attributes:
        input_ids: Begin token, tokens, end token, and padding [T].
        targets: The next token at each position [T]; -100 is ignored, as is the end of a truncated caption.
        end: Position of the end token.
        is_cut: Whether the caption was truncated.
    """

    input_ids: np.ndarray
    targets: np.ndarray
    end: int
    is_cut: bool


class CaptionEncoder:
    """Encodes captions.

    Args:
        tokenizer: Tokenizer.
        context_length: Maximum tokens T, including begin and end tokens; longer captions are truncated.
    """

    def __init__(self, tokenizer: Tokenizer, context_length: int) -> None:
        self.tokenizer, self.context_length = tokenizer, context_length

    def __call__(self, caption: str) -> EncodedCaption:
        """Encode a caption.

        Raises:
            UserError: If the tokenizer cannot encode it.
        """
        eos, begin = self.tokenizer.eos_id, self.tokenizer.begin_ids or [self.tokenizer.eos_id]
        with as_user_error(f"the tokenizer cannot encode {caption!r}"):
            ids = [*begin, *self.tokenizer.encode([caption])[0].tolist()]
        kept = ids[: self.context_length - 1]
        input_ids = np.full(self.context_length, eos, dtype=np.int64)
        input_ids[: len(kept)] = kept
        targets = np.full(self.context_length, IGNORED, dtype=np.int64)
        end = len(kept)
        targets[len(begin) - 1 : end] = input_ids[len(begin) : end + 1]
        is_cut = len(kept) < len(ids)
        if is_cut:
            targets[end - 1] = IGNORED  # truncated: no end
        return EncodedCaption(input_ids, targets, end, is_cut)


class CaptionBatch(NamedTuple):
    """A batch.

    Attributes:
        images: Images uint8 [B, 3, size, size]; black for unreadable images.
        texts: M captions: in training one per image, in evaluation all.
        counts: Valid images [B], boolean: False for unreadable images and padding.
        names: Names of the readable images.
        num_cut: Number of truncated captions.
        skipped: Unreadable images as (name, reason).
    """

    images: Tensor
    texts: Texts
    counts: Tensor
    names: list[str]
    num_cut: int
    skipped: list[tuple[str, str]]


class CaptionedImage(NamedTuple):
    """A sample; for unreadable images `image` is the reason."""

    image: Tensor | SkippedSample
    captions: list[EncodedCaption]
    name: str
    is_padding: bool


class CaptionedSamples(Dataset):
    """Decoded and transformed images of a source with their captions.

    Args:
        source: Source of the images.
        transform: uint8 [3, H, W] -> uint8 [3, size, size].
        encode: Encodes captions.
        seed: Seed of the run; augmentation and the choice of a caption are functions of (seed, epoch, index).
        max_pixels: As in `dcvision.data.decode.decode`.
        has_all: Whether to return all captions of an image instead of one.
    """

    def __init__(
        self,
        source: CaptionSource,
        transform: Transform,
        encode: CaptionEncoder,
        seed: int,
        max_pixels: int,
        has_all: bool,
    ) -> None:
        self.source, self.transform, self.encode = source, transform, encode
        self.seed, self.max_pixels, self.has_all = seed, max_pixels, has_all

    def __getitem__(self, ref: SampleRef) -> CaptionedImage:
        name, key = self.source.name(ref.index), (self.seed, ref.epoch, ref.index)
        try:
            encoded, captions = self.source.read(ref.index)
        except OSError as error:  # a removed file, or a disk error
            return CaptionedImage(SkippedSample(name, reason(error)), [self.encode("")], name, ref.is_padding)
        image = make_image(encoded, name, self.transform, self.max_pixels, *key)
        chosen = captions if self.has_all else [choose_caption(captions, key)]
        return CaptionedImage(image, [self.encode(caption) for caption in chosen], name, ref.is_padding)


def choose_caption(captions: Sequence[str], key: Sequence[int]) -> str:
    """Select one of an image's captions by `key`."""
    return captions[0] if len(captions) == 1 else captions[np.random.default_rng([*key]).integers(len(captions))]


class CaptionCollate:
    """Stacks samples to batches of full size, including unreadable images.

    Args:
        image_size: Side of the images.
    """

    def __init__(self, image_size: int) -> None:
        self.image_size = image_size

    def __call__(self, samples: list[CaptionedImage]) -> CaptionBatch:
        are_bad = [isinstance(sample.image, SkippedSample) for sample in samples]
        images = [
            black(self.image_size, sample.image) if is_bad else sample.image
            for sample, is_bad in zip(samples, are_bad, strict=True)
        ]
        counts = [not is_bad and not sample.is_padding for sample, is_bad in zip(samples, are_bad, strict=True)]
        captions = [caption for sample in samples for caption in sample.captions]
        owners = [number for number, sample in enumerate(samples) for _ in sample.captions]
        ids, targets = (torch.from_numpy(np.stack(rows)) for rows in zip(*(c[:2] for c in captions), strict=True))
        targets[[not counts[owner] for owner in owners]] = IGNORED
        texts = Texts(ids, targets, torch.tensor([caption.end for caption in captions]), torch.tensor(owners))
        skipped = [tuple(sample.image) for sample, is_bad in zip(samples, are_bad, strict=True) if is_bad]
        num_cut = sum(caption.is_cut for caption in captions)
        names = [sample.name for sample, is_bad in zip(samples, are_bad, strict=True) if not is_bad]
        return CaptionBatch(torch.stack(images), texts, torch.tensor(counts), names, num_cut, skipped)


def black(size: int, image: Tensor) -> Tensor:
    """Return a black image, uint8 [3, size, size]."""
    return torch.zeros(3, size, size, dtype=torch.uint8)

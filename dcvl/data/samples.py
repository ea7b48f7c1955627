"""From a source to batches of images with their captions as tokens."""

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
    """A caption as tokens.

    Attributes:
        input_ids: What begins a text, the tokens, what ends it, and padding [T].
        targets: The next token at each place [T]; -100 does not count, nor does the end of a caption that is cut.
        end: Where the text ends.
        is_cut: Whether it was too long.
    """

    input_ids: np.ndarray
    targets: np.ndarray
    end: int
    is_cut: bool


class CaptionEncoder:
    """Encodes captions.

    Args:
        tokenizer: Makes the tokens.
        context_length: Most tokens T, with what begins and what ends a text; a longer caption loses its end.
    """

    def __init__(self, tokenizer: Tokenizer, context_length: int) -> None:
        self.tokenizer, self.context_length = tokenizer, context_length

    def __call__(self, caption: str) -> EncodedCaption:
        """Encode a caption.

        Raises:
            UserError: If the tokenizer cannot.
        """
        eos, begin = self.tokenizer.eos_id, self.tokenizer.begin_ids or [self.tokenizer.eos_id]
        with as_user_error(f"{caption!r} holds what the tokenizer has no token for"):
            ids = [*begin, *self.tokenizer.encode([caption])[0].tolist()]
        kept = ids[: self.context_length - 1]
        input_ids = np.full(self.context_length, eos, dtype=np.int64)
        input_ids[: len(kept)] = kept
        targets = np.full(self.context_length, IGNORED, dtype=np.int64)
        end = len(kept)
        targets[len(begin) - 1 : end] = input_ids[len(begin) : end + 1]
        is_cut = len(kept) < len(ids)
        if is_cut:
            targets[end - 1] = IGNORED  # it does not end there
        return EncodedCaption(input_ids, targets, end, is_cut)


class CaptionBatch(NamedTuple):
    """What a step gets.

    Attributes:
        images: uint8 [B, 3, size, size]; black where one could not be read.
        texts: Their captions, M of them: in training one of each image, in an evaluation all.
        counts: Which images count [B], boolean: not those that could not be read, or only pad a rank's share.
        names: Of the images that could be read.
        num_cut: Captions that were too long.
        skipped: Images that could not be read, as (name, reason).
    """

    images: Tensor
    texts: Texts
    counts: Tensor
    names: list[str]
    num_cut: int
    skipped: list[tuple[str, str]]


class CaptionedImage(NamedTuple):
    """A sample on its way to a batch; `image` says what was wrong where it could not be read."""

    image: Tensor | SkippedSample
    captions: list[EncodedCaption]
    name: str
    is_padding: bool


class CaptionedSamples(Dataset):
    """Decoded and transformed images of a source with their captions.

    Args:
        source: Where they come from.
        transform: uint8 [3, H, W] -> uint8 [3, size, size].
        encode: Encodes captions.
        seed: Seed of the run; augmentation and the choice of a caption draw from (seed, epoch, index).
        max_pixels: As in `dcvision.data.decode.decode`.
        has_all: Give all captions of an image, in place of one.
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
        except OSError as error:  # removed, or a disk that fails
            return CaptionedImage(SkippedSample(name, reason(error)), [self.encode("")], name, ref.is_padding)
        image = make_image(encoded, name, self.transform, self.max_pixels, *key)
        chosen = captions if self.has_all else [choose_caption(captions, key)]
        return CaptionedImage(image, [self.encode(caption) for caption in chosen], name, ref.is_padding)


def choose_caption(captions: Sequence[str], key: Sequence[int]) -> str:
    """Choose one of an image's captions by `key`."""
    return captions[0] if len(captions) == 1 else captions[np.random.default_rng([*key]).integers(len(captions))]


class Collate:
    """Puts samples together; as many as asked for, whatever could not be read.

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
    """Make a black image, uint8 [3, size, size], of any other."""
    return torch.zeros(3, size, size, dtype=torch.uint8)

"""Decoding and augmentation of images to uint8 tensors. Normalization is done on the device.

Training: random resized crop and flip on tensors, then optionally RandAugment on a PIL image. Evaluation: resize of the
smaller side, central crop. Random choices are a function of (seed, epoch, sample), independent of the worker.
"""

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import InterpolationMode, v2

# torchvision 0.29 warns at every call that its decoders will move to TorchCodec.
warnings.filterwarnings("ignore", "The image decoding and encoding capabilities of TorchVision", DeprecationWarning)

Transform = Callable[[Tensor], Tensor]
MAX_PIXELS = 2**27  # 400 MB decoded; the largest image of ImageNet has about half as many pixels
PIXEL_LIMIT = 2 * Image.MAX_IMAGE_PIXELS  # Pillow does not open larger images


class BadImage(Exception):
    """An image that cannot be decoded."""


def decode(encoded: bytes, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Decode an image to RGB, uint8 [3, H, W], by torchvision, or by Pillow for other formats.

    The EXIF orientation is not applied, as in the data sets of torchvision and timm. For animations the first frame is
    returned.

    Args:
        encoded: Content of the file.
        max_pixels: Maximum number of pixels, checked before decoding.

    Raises:
        BadImage: If the image cannot be decoded, or is too large.
    """
    _check_size(encoded, max_pixels)
    with suppress(RuntimeError, ValueError):  # an unknown format or a damaged file, which Pillow distinguishes
        image = decode_image(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), ImageReadMode.RGB)
        image = image if image.dim() == 3 else image[0]  # the first frame of an animation
        return v2.functional.to_dtype(image, torch.uint8, scale=True)  # PNG and AVIF may have 16 bits
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            if image.mode[0] in "IF":  # Pillow would clip their values
                raise BadImage(f"more than 8 bits per channel (mode {image.mode})")
            return v2.functional.pil_to_tensor(image.convert("RGB"))
    except BadImage:
        raise
    except UnidentifiedImageError as error:
        raise BadImage("unknown image format, or truncated") from error
    except Exception as error:  # Pillow raises many types of errors for damaged files
        raise BadImage(f"{type(error).__name__}: {error}") from error


def _check_size(encoded: bytes, max_pixels: int) -> None:
    """Check the size in the header; formats unknown to Pillow are left to torchvision."""
    with warnings.catch_warnings(), suppress(UnidentifiedImageError, OSError, ValueError, SyntaxError):
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(encoded)) as image:
                width, height = image.size
        except Image.DecompressionBombError as error:  # Pillow's own, larger limit
            raise BadImage(f"more than max_pixels={max_pixels:,} pixels") from error
        if width * height > max_pixels:
            raise BadImage(f"{width} x {height} is more than max_pixels={max_pixels:,} pixels")


def train_transform(
    size: int, min_crop_area: float, horizontal_flip: bool, randaugment_ops: int, randaugment_magnitude: int
) -> Transform:
    """Create the training transform: uint8 [3, H, W] -> uint8 [3, size, size]."""
    steps: list = [v2.RandomResizedCrop(size, scale=(min_crop_area, 1.0), antialias=True)]
    if min_crop_area == 1.0:
        steps = [v2.Resize((size, size), antialias=True)]
    if horizontal_flip:
        steps.append(v2.RandomHorizontalFlip())
    if randaugment_ops:
        augment = v2.RandAugment(randaugment_ops, randaugment_magnitude, interpolation=InterpolationMode.BILINEAR)
        steps += [v2.ToPILImage(), augment, v2.PILToTensor()]
    return v2.Compose(steps)


def eval_transform(size: int, crop_fraction: float) -> Transform:
    """Create the evaluation transform: resize the smaller side to size / crop_fraction, then crop the center."""
    return v2.Compose([v2.Resize(round(size / crop_fraction), antialias=True), v2.CenterCrop(size)])


@contextmanager
def sample_rng(*key: int) -> Iterator[None]:
    """Run the body with torch's CPU generator seeded by `key`; its state is restored afterwards."""
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
    with torch.random.fork_rng(devices=()):
        torch.random.default_generator.manual_seed(seed)
        yield

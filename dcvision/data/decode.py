"""Encoded image -> augmented uint8 tensor. Normalisation is left to the device.

Training: random resized crop and flip on tensors, then RandAugment on a PIL image where asked for. Evaluation: resize
the small side, central crop. Random choices are those of (seed, epoch, sample), whichever worker makes the sample.
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

# torchvision 0.29 announces that its decoders will move to TorchCodec, at every call.
warnings.filterwarnings("ignore", "The image decoding and encoding capabilities of TorchVision", DeprecationWarning)

Transform = Callable[[Tensor], Tensor]
MAX_PIXELS = 2**27  # 400 MB decoded; the largest image of ImageNet has about half as many
PIXEL_LIMIT = 2 * Image.MAX_IMAGE_PIXELS  # Pillow opens no larger image


class BadImage(Exception):
    """An image that no decoder can read."""


def decode(encoded: bytes, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Decode an image to RGB, uint8 [3, H, W]; by torchvision, or by Pillow for the formats it does not know.

    As it is stored: an orientation in its EXIF data is not applied, as torchvision's and timm's data sets do not. Of an
    animation the first picture is taken.

    Args:
        encoded: The file's content.
        max_pixels: Images of more are refused before they are decoded.

    Raises:
        BadImage: If neither can, or the image is too large.
    """
    _check_size(encoded, max_pixels)
    with suppress(RuntimeError, ValueError):  # an unknown format or a damaged file: Pillow tells which
        image = decode_image(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), ImageReadMode.RGB)
        image = image if image.dim() == 3 else image[0]  # an animation's first picture
        return v2.functional.to_dtype(image, torch.uint8, scale=True)  # PNG and AVIF may have 16 bits
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            if image.mode[0] in "IF":  # Pillow would clip their values
                raise BadImage(f"more than 8 bits a channel (mode {image.mode})")
            return v2.functional.pil_to_tensor(image.convert("RGB"))
    except BadImage:
        raise
    except UnidentifiedImageError as error:
        raise BadImage("no known image format, or cut short") from error
    except Exception as error:  # Pillow raises many types on damaged files
        raise BadImage(f"{type(error).__name__}: {error}") from error


def _check_size(encoded: bytes, max_pixels: int) -> None:
    """Read the size from the header; a format that Pillow does not know is left to torchvision."""
    with warnings.catch_warnings(), suppress(UnidentifiedImageError, OSError, ValueError, SyntaxError):
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(encoded)) as image:
                width, height = image.size
        except Image.DecompressionBombError as error:  # Pillow's own, larger limit
            raise BadImage(f"more than max_pixels={max_pixels:,} pixels") from error
        if width * height > max_pixels:
            raise BadImage(f"{width} x {height} are more than max_pixels={max_pixels:,} pixels")


def train_transform(
    size: int, min_crop_area: float, horizontal_flip: bool, randaugment_ops: int, randaugment_magnitude: int
) -> Transform:
    """Make the training transform: uint8 [3, H, W] -> uint8 [3, size, size]."""
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
    """Make the evaluation transform: the small side to size / crop_fraction, then the central square."""
    return v2.Compose([v2.Resize(round(size / crop_fraction), antialias=True), v2.CenterCrop(size)])


@contextmanager
def sample_rng(*key: int) -> Iterator[None]:
    """Run the body with torch's CPU generator seeded by `key`, and leave it as it was."""
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
    with torch.random.fork_rng(devices=()):
        torch.random.default_generator.manual_seed(seed)
        yield

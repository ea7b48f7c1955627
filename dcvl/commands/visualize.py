"""`dcvl visualize`: figures of the cross-attention of words."""

import torch

from dctrain.checkpointing.checkpoint import make_folder
from dctrain.errors import UserError

from ..caption_plots import draw_words
from ..captioning import generate_captions
from ..data.samples import CaptionEncoder
from ..load import load_pair
from .images import batches, check_captioner, find_images


def visualize(checkpoint: str, image: str, out: str, text: str | None = None, device: str = "cpu") -> None:
    """Plot the cross-attention of each word of a caption to the image, per head, before and after composition.

    Args:
        checkpoint: A .ckpt file or run of `dcvl fit`, or a folder written by `export`.
        image: An image file.
        out: Folder for the figures (PNG), one per layer with cross-attention.
        text: The caption; default: the generated caption.
        device: Device, such as cuda.
    """
    files = find_images([image])
    if len(files) > 1:
        raise UserError(f"image={image} has {len(files)} images; expected one.")
    pair = load_pair(checkpoint, device)
    check_captioner(pair)
    encode = CaptionEncoder(pair.tokenizer, pair.encode.context_length + 1)  # the end token is a target, not an input
    if text is not None and encode(text).is_cut:
        raise UserError(f"text is longer than the {pair.encode.context_length} tokens of the model's context.")
    ((_, normalized),) = batches(pair, files, 1)
    if text is None:
        (text,) = generate_captions(pair.model, normalized, pair.tokenizer, pair.encode.context_length - 1)
    mean, std = (torch.tensor(pair.metadata[name]).view(3, 1, 1) for name in ("mean", "std"))
    pixels = (255 * (normalized[0].cpu() * std + mean)).round().to(torch.uint8)
    with torch.inference_mode():
        figures = draw_words(pair.model, pixels, normalized[0], encode(text), pair.tokenizer)
    folder = make_folder(out)
    print(text)
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        print(path)

"""`dcvl visualize`: draws where each word of a caption looks when it is told."""

import torch

from dctrain.checkpointing.checkpoint import make_folder
from dctrain.errors import UserError

from ..caption_plots import draw_words
from ..captioning import generate_captions
from ..data.samples import CaptionEncoder
from ..load import load_pair
from .images import batches, check_captioner, find_images


def visualize(checkpoint: str, image: str, out: str, text: str | None = None, device: str = "cpu") -> None:
    """Draw where each word of a caption looks in the picture, per head, before and after composition.

    Args:
        checkpoint: A .ckpt file or run of `dcvl fit`, or a folder that `export` wrote.
        image: A picture file.
        out: Folder for the pictures (PNG), one for each layer that looks at the image.
        text: The caption; what the model tells, if left out.
        device: Where to run, such as cuda.
    """
    files = find_images([image])
    if len(files) > 1:
        raise UserError(f"image={image} holds {len(files)} pictures; expected one.")
    pair = load_pair(checkpoint, device)
    check_captioner(pair)
    encode = CaptionEncoder(pair.tokenizer, pair.encode.context_length + 1)  # what ends a caption is told, but not read
    if text is not None and encode(text).is_cut:
        raise UserError(f"text is longer than the {pair.encode.context_length} tokens that the model takes.")
    ((_, normalised),) = batches(pair, files, 1)
    if text is None:
        (text,) = generate_captions(pair.model, normalised, pair.tokenizer, pair.encode.context_length - 1)
    mean, std = (torch.tensor(pair.metadata[name]).view(3, 1, 1) for name in ("mean", "std"))
    pixels = (255 * (normalised[0].cpu() * std + mean)).round().to(torch.uint8)
    with torch.inference_mode():
        figures = draw_words(pair.model, pixels, normalised[0], encode(text), pair.tokenizer)
    folder = make_folder(out)
    print(text)
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        print(path)

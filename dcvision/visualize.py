"""`dcvision visualize`: shows what composition does to an image."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from dcmha import ComposedAttentionBase, record_attention
from dctrain.checkpointing.checkpoint import make_folder
from dctrain.errors import UserError

from .attention_plots import AttentionView, draw_attention, log_figures, patch_grid, prefix_tokens, read_image
from .compat_checks import normalisation
from .export import load_network


def visualize(checkpoint: str, image: str, out: str, query: int | None = None) -> list[Path]:
    """Draw what composition does to an image.

    Args:
        checkpoint: A .ckpt file, or the folder of a run.
        image: An image file; it is resized and cropped to the model's size.
        out: Folder for the pictures, as PNG and for TensorBoard.
        query: Which patch looks, counted row by row; the middle one if None.

    Returns:
        The pictures, which are printed too.

    Raises:
        UserError: If a file cannot be read or written, the model has no composed layer or attends within windows, or
            there is no such patch.
    """
    model, size, _ = load_network(checkpoint)
    check_layers(model)
    pixels = read_image(image, size)
    view = make_view(model, pixels, query)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in normalisation(model).values())
    with torch.no_grad(), record_attention(model.eval()) as recorded:
        model(((pixels / 255 - mean) / std)[None])
    figures = draw_attention(recorded, view)
    root = make_folder(out)
    for name, figure in figures.items():
        figure.savefig(root / f"{name}.png", dpi=100)
    with SummaryWriter(str(root)) as writer:
        log_figures(writer, figures, step=0)
    paths = [root / f"{name}.png" for name in figures]
    print(*paths, f"tensorboard --logdir {out}", sep="\n")
    return paths


def check_layers(model: nn.Module) -> None:
    """Check that there is something to look at.

    Raises:
        UserError: If not.
    """
    if not any(isinstance(module, ComposedAttentionBase) for module in model.modules()):
        raise UserError(f"{type(model).__name__} has no DCAttention, nor other composed layers, to look at.")


def make_view(model: nn.Module, pixels: Tensor, query: int | None) -> AttentionView:
    """Describe an image, uint8 [3, size, size], and the patch of it that looks."""
    return AttentionView(pixels, patch_grid(model, pixels.shape[-1]), prefix_tokens(model), query)

"""`dcvision visualize`: figures of attention and composition on an image."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from dcmha import ComposedAttentionBase, record_attention
from dctrain.checkpointing.checkpoint import make_folder
from dctrain.errors import UserError

from .attention_plots import AttentionView, draw_attention, log_figures, patch_grid, prefix_tokens, read_image
from .compat_checks import normalization
from .export import load_network


def visualize(checkpoint: str, image: str, out: str, query: int | None = None) -> list[Path]:
    """Plot attention before and after composition on an image.

    Args:
        checkpoint: A .ckpt file, or the folder of a run.
        image: An image file; it is resized and cropped to the model's size.
        out: Folder for the figures, as PNG and for TensorBoard.
        query: Index of the query patch, row by row; the middle one if None.

    Returns:
        Paths of the figures, which are also printed.

    Raises:
        UserError: If a file cannot be read or written, the model has no composed layer or attends within windows, or
            the patch does not exist.
    """
    model, size, _ = load_network(checkpoint)
    check_layers(model)
    pixels = read_image(image, size)
    view = make_view(model, pixels, query)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in normalization(model).values())
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
    """Check that a model has composed layers.

    Raises:
        UserError: If not.
    """
    if not any(isinstance(module, ComposedAttentionBase) for module in model.modules()):
        raise UserError(f"{type(model).__name__} has no composed attention layers.")


def make_view(model: nn.Module, pixels: Tensor, query: int | None) -> AttentionView:
    """Create the view of an image, uint8 [3, size, size], and a query patch."""
    return AttentionView(pixels, patch_grid(model, pixels.shape[-1]), prefix_tokens(model), query)

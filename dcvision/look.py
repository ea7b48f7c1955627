"""See what composition does to an image: `python -m dcvision look CHECKPOINT IMAGE FOLDER`.

For each layer one picture: where a query patch looks, per head, before the post-composition and after it. For the model
one more: the compositions, averaged over all pairs. As PNG files, and as images for TensorBoard.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2.functional import center_crop, resize

from dcmha import record_attention
from dcmha.recording import Recorded
from dctrain.checkpoint import find_checkpoint
from dctrain.errors import UserError

from .export import load_network


def look(checkpoint: str, image: str, folder: str, query: int | None = None) -> list[Path]:
    """Draw the attention of a trained model on an image.

    Args:
        checkpoint: A checkpoint of `dcvision fit`, or a run's folder.
        image: An image file; it is resized and cropped to the model's size.
        folder: Where to write the pictures and TensorBoard's file.
        query: Which patch looks, counted row by row; the middle one if None.

    Returns:
        The pictures.

    Raises:
        UserError: If a file cannot be read, the model has no `DCAttention` on a square of patches, or there is no such
            patch.
    """
    model, size = load_network(str(find_checkpoint(checkpoint)))
    pixels = _read_image(image, size)
    mean, std = (torch.tensor(model.pretrained_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
    try:
        with torch.no_grad(), record_attention(model.eval()) as recorded:
            model(((pixels / 255 - mean) / std)[None])
    except ValueError as error:
        raise UserError(f"{checkpoint}: {error}") from error
    side, prefix = _patches(recorded, getattr(model, "num_prefix_tokens", 0))
    query = side * (side // 2) + side // 2 if query is None else query
    if not 0 <= query < side * side:
        raise UserError(f"--query={query}; accepted: 0 to {side * side - 1}, the patches of {side} x {side}.")
    figures = {name: _draw_layer(name, one, pixels, side, prefix, query) for name, one in recorded.items()}
    figures["compositions"] = _draw_compositions(recorded)
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    paths = []
    with SummaryWriter(str(root)) as writer:
        for name, figure in figures.items():
            paths.append(root / f"{name}.png")
            figure.savefig(paths[-1], dpi=100)
            writer.add_image(name, _as_array(figure), dataformats="HWC")
    return paths


def _read_image(path: str, size: int) -> Tensor:
    """Read an image, resized and cropped to the model's size: uint8 [3, size, size]."""
    try:
        pixels = decode_image(path, mode=ImageReadMode.RGB)
    except RuntimeError as error:
        raise UserError(f"the image {path} cannot be read: {error}") from error
    return center_crop(resize(pixels, [size], antialias=True), [size, size])


def _patches(recorded: dict[str, Recorded], prefix: int) -> tuple[int, int]:
    """Return the side of the square of patches and the number of tokens before it."""
    tokens = next(iter(recorded.values())).maps.weights.shape[-1] - prefix
    side = round(max(tokens, 0) ** 0.5)
    if side * side != tokens or not side:
        raise UserError(f"the model attends to {tokens} patches, which are no square.")
    return side, prefix


def _draw_layer(name: str, one: Recorded, pixels: Tensor, side: int, prefix: int, query: int) -> Figure:
    """Draw, for every head, where the query looks before the post-composition and after it."""
    rows = [
        ("weights", one.maps.weights[0, :, prefix + query, prefix:]),
        ("composed", one.maps.composed_weights[0, :, prefix + query, prefix:]),
    ]
    heads = len(rows[0][1])
    limit = max(float(values.abs().max()) for _, values in rows)
    figure = Figure(figsize=(1.6 * (heads + 1), 3.8), layout="constrained")
    figure.suptitle(f"{name}: where patch {query} looks (red: positive, blue: negative)")
    axes = figure.subplots(2, heads + 1, squeeze=False)
    for line, (label, values) in zip(axes, rows, strict=True):
        line[0].imshow(pixels.permute(1, 2, 0).numpy())
        scale = pixels.shape[-1] / side
        line[0].plot((query % side + 0.5) * scale - 0.5, (query // side + 0.5) * scale - 0.5, "r+", markersize=12)
        line[0].set_title(label, fontsize=9)
        for head, cell in enumerate(line[1:]):
            drawn = cell.imshow(values[head].view(side, side).numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
            cell.set_title(f"head {head}", fontsize=9)
        for cell in line:
            cell.set_axis_off()
    figure.colorbar(drawn, ax=axes[:, -1].tolist(), shrink=0.8)
    return figure


def _draw_compositions(recorded: dict[str, Recorded]) -> Figure:
    """Draw the compositions of all layers, without the identity, averaged over the pairs of the image."""
    matrices = [(one.pre_composition, one.post_composition) for one in recorded.values()]
    changes = [[None if m is None else m - torch.eye(len(m)) for m in pair] for pair in matrices]
    limit = max((float(m.abs().max()) for pair in changes for m in pair if m is not None), default=1.0) or 1.0
    figure = Figure(figsize=(1.8 * len(changes) + 1.2, 4.4), layout="constrained")
    figure.suptitle("mean composition less the identity: from head (row) to head (column)")
    axes = figure.subplots(2, len(changes), squeeze=False)
    drawn = None
    for column, (name, pair) in enumerate(zip(recorded, changes, strict=True)):
        for line, label, matrix in zip(axes, ("pre", "post"), pair, strict=True):
            cell = line[column]
            cell.set_title(f"{name}\n{label}" if label == "pre" else label, fontsize=8)
            if matrix is None:
                cell.set_axis_off()
                continue
            drawn = cell.imshow(matrix.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
            cell.set(xticks=[], yticks=[])
    if drawn is not None:
        figure.colorbar(drawn, ax=axes[:, -1].tolist(), shrink=0.8)
    return figure


def _as_array(figure: Figure) -> np.ndarray:
    """Render a figure: uint8 [height, width, 3]."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def look_command(args: list[str]) -> None:
    """Run `dcvision look`."""
    parser = argparse.ArgumentParser("dcvision look", description="Draw what composition does to an image.")
    parser.add_argument("checkpoint", help="a .ckpt file of dcvision fit, or the folder of a run")
    parser.add_argument("image", help="an image file")
    parser.add_argument("folder", help="for the pictures, as PNG and for TensorBoard")
    parser.add_argument("--query", type=int, help="the patch that looks, counted row by row; the middle one if absent")
    options = parser.parse_args(args)
    for path in look(options.checkpoint, options.image, options.folder, options.query):
        print(path)
    print(f"tensorboard --logdir {options.folder}")

"""Pictures of what composition does to an image.

For each layer one: where a query patch looks, per head, before and after each composition. For the model one more: the
compositions, averaged over all pairs.
"""

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2.functional import center_crop, resize

from dcmha.recording import Recorded
from dctrain.errors import UserError


def draw_attention(recorded: dict[str, Recorded], pixels: Tensor, prefix: int, query: int | None) -> dict[str, Figure]:
    """Draw one picture per recorded layer, and one of all compositions.

    Args:
        recorded: One image's maps, from `dcmha.record_attention`.
        pixels: That image, uint8 [3, size, size].
        prefix: Tokens before the patches (class token, registers).
        query: Which patch looks, counted row by row; the middle one if None.

    Returns:
        The pictures, by the name of the layer; "compositions" is the last.

    Raises:
        UserError: If the patches are no square, or there is no such patch.
    """
    side = _side(recorded, prefix)
    query = side * (side // 2) + side // 2 if query is None else query
    if not 0 <= query < side * side:
        raise UserError(f"query={query}; accepted: 0 to {side * side - 1}, the patches of {side} x {side}.")
    figures = {name: _draw_layer(name, one, pixels, side, prefix, query) for name, one in recorded.items()}
    return figures | {"compositions": _draw_compositions(recorded)}


def log_pictures(writer: SummaryWriter, figures: dict[str, Figure], step: int) -> None:
    """Write pictures to TensorBoard, as `attention/NAME`."""
    for name, figure in figures.items():
        writer.add_image(f"attention/{name}", _as_array(figure), step, dataformats="HWC")


def read_image(path: str, size: int) -> Tensor:
    """Read an image, resized and cropped to the model's size.

    Returns:
        uint8 [3, size, size].

    Raises:
        UserError: If the file cannot be read.
    """
    try:
        pixels = decode_image(path, mode=ImageReadMode.RGB)
    except RuntimeError as error:
        raise UserError(f"the image {path} cannot be read: {error}") from error
    return center_crop(resize(pixels, [size], antialias=True), [size, size])


def _side(recorded: dict[str, Recorded], prefix: int) -> int:
    """Return the side of the square of patches."""
    tokens = next(iter(recorded.values())).maps.weights.shape[-1] - prefix
    side = round(max(tokens, 0) ** 0.5)
    if side * side != tokens or not side:
        raise UserError(f"the model attends to {tokens} patches, which are no square.")
    return side


def _draw_layer(name: str, one: Recorded, pixels: Tensor, side: int, prefix: int, query: int) -> Figure:
    """Draw, for every head, where the query looks before any composition, after the first, and after both."""
    rows = {
        "uncomposed": one.uncomposed_weights,
        "pre-composed": one.maps.weights,
        "then post-composed": one.maps.composed_weights,
    }
    rows = {label: maps[0, :, prefix + query, prefix:].cpu() for label, maps in rows.items()}
    heads = len(rows["uncomposed"])
    limit = max(float(values.abs().max()) for values in rows.values())
    figure = Figure(figsize=(1.6 * (heads + 1), 1.8 * len(rows) + 0.3), layout="constrained")
    figure.suptitle(f"{name}: where patch {query} looks (red: positive, blue: negative)")
    axes = figure.subplots(len(rows), heads + 1, squeeze=False)
    for line, (label, values) in zip(axes, rows.items(), strict=True):
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
    changes = [[None if m is None else m.cpu() - torch.eye(len(m)) for m in pair] for pair in matrices]
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

"""Figures of attention and composition on an image.

One figure per layer shows the attention of a query patch, per head, before and after each composition. Another figure
shows the compositions of all layers, averaged over all pairs.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from dcmha.analysis import Recorded
from dctrain.errors import UserError, as_user_error
from dctrain.utils.files import check_regular

from .data.decode import decode, eval_transform


@dataclass
class AttentionView:
    """An image and a query patch.

    Attributes:
        pixels: The image, uint8 [3, size, size].
        grid: Rows and columns of its patches.
        prefix: Number of tokens before the patches (class token, registers).
        query: Index of the query patch, row by row; the middle one if None.
    """

    pixels: Tensor
    grid: tuple[int, int]
    prefix: int
    query: int | None

    def __post_init__(self) -> None:
        rows, columns = self.grid
        if self.query is None:
            self.query = columns * (rows // 2) + columns // 2
        if not 0 <= self.query < rows * columns:
            accepted = f"expected 0 to {rows * columns - 1} for {rows} x {columns} patches"
            raise UserError(f"query={self.query}; {accepted}.")

    def check(self, recorded: dict[str, Recorded]) -> None:
        """Check that each layer attends to all tokens, not within windows.

        Raises:
            UserError: If a layer attends within windows.
        """
        rows, columns = self.grid
        for name, one in recorded.items():
            images, _, *tokens = one.maps.weights.shape
            if images != 1 or tokens != [self.prefix + rows * columns] * 2:
                raise UserError(
                    f"{name} attends within {images} x {tokens[1]} tokens; expected layers that attend to all "
                    f"{rows} x {columns} patches and {self.prefix} prefix tokens, without windows."
                )


def draw_attention(recorded: dict[str, Recorded], view: AttentionView) -> dict[str, Figure]:
    """Plot one figure per recorded layer, and one of all compositions if there are any.

    Args:
        recorded: Result of `dcmha.record_attention` for one image.
        view: The image and the query patch.

    Returns:
        Figures by layer name; the last one is "compositions".

    Raises:
        UserError: If a layer attends within windows.
    """
    view.check(recorded)
    figures = {name: _draw_layer(name, one, view) for name, one in recorded.items()}
    if any(m is not None for one in recorded.values() for m in (one.pre_composition, one.post_composition)):
        figures["compositions"] = _draw_compositions(recorded)
    return figures


def patch_grid(model: nn.Module, size: int) -> tuple[int, int]:
    """Return the rows and columns of patches of a timm model for an image of this size.

    Raises:
        UserError: If the model has no patches.
    """
    embed = getattr(model, "patch_embed", None)
    if hasattr(embed, "dynamic_feat_size"):
        return embed.dynamic_feat_size((size, size))
    if hasattr(getattr(model, "embeds", None), "patch_size"):  # NaFlexViT
        height, width = model.embeds.patch_size
        return size // height, size // width
    raise UserError(f"{type(model).__name__} has no patches to plot.")


def prefix_tokens(model: nn.Module) -> int:
    """Return the number of tokens (class token, registers) before the patches in a timm model."""
    return getattr(model, "num_prefix_tokens", 0)


def log_figures(writer: SummaryWriter, figures: dict[str, Figure], step: int) -> None:
    """Write figures to TensorBoard as `attention/NAME`."""
    for name, figure in figures.items():
        writer.add_image(f"attention/{name}", _as_array(figure), step, dataformats="HWC")


def read_image(path: str, size: int) -> Tensor:
    """Read an image, resized and cropped to the model's size.

    Returns:
        uint8 [3, size, size].

    Raises:
        UserError: If the file cannot be read.
    """
    with as_user_error(f"cannot read the image {path}"):
        pixels = decode(check_regular(Path(path)).read_bytes())
    return eval_transform(size, crop_fraction=1.0)(pixels)


def _draw_layer(name: str, one: Recorded, view: AttentionView) -> Figure:
    """Plot the attention of the query for every head: without composition, and after each composition."""
    maps = {"uncomposed": one.uncomposed_weights}
    if one.pre_composition is not None:
        maps["pre-composed"] = one.maps.weights
    if one.post_composition is not None:
        maps["post-composed"] = one.maps.composed_weights
    pixels, grid, prefix, query = view.pixels, view.grid, view.prefix, view.query
    grids = {label: weights[0, :, prefix + query, prefix:].cpu().unflatten(-1, grid) for label, weights in maps.items()}
    heads = len(grids["uncomposed"])
    limit = max(float(values.abs().max()) for values in grids.values())
    figure = Figure(figsize=(max(6.0, 1.6 * (heads + 1)), 1.8 * len(grids) + 0.3), layout="constrained")
    figure.suptitle(f"{name}: attention of patch {query} (red: positive, blue: negative)", fontsize=11)
    axes = figure.subplots(len(grids), heads + 1, squeeze=False)
    height, width = pixels.shape[1] / grid[0], pixels.shape[2] / grid[1]
    row, column = divmod(query, grid[1])
    for line, (label, values) in zip(axes, grids.items(), strict=True):
        line[0].imshow(pixels.permute(1, 2, 0).numpy())
        line[0].plot((column + 0.5) * width - 0.5, (row + 0.5) * height - 0.5, "r+", markersize=12)
        line[0].set_title(label, fontsize=9)
        for head, cell in enumerate(line[1:]):
            aspect = height / width
            drawn = cell.imshow(values[head].numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect=aspect)
            cell.set_title(f"head {head}", fontsize=9)
        for cell in line:
            cell.set_axis_off()
    figure.colorbar(drawn, ax=axes[:, -1].tolist(), shrink=0.8)
    return figure


def _draw_compositions(recorded: dict[str, Recorded]) -> Figure:
    """Plot the compositions of all layers, without the identity, averaged over the pairs of the image."""
    matrices = [(one.pre_composition, one.post_composition) for one in recorded.values()]
    changes = [[None if m is None else m.cpu() - torch.eye(len(m)) for m in pair] for pair in matrices]
    limit = max((float(m.abs().max()) for pair in changes for m in pair if m is not None), default=1.0) or 1.0
    figure = Figure(figsize=(max(6.0, 1.8 * len(changes) + 1.2), 4.4), layout="constrained")
    figure.suptitle("mean composition minus the identity: from head (row) to head (column)", fontsize=11)
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

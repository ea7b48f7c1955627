"""Pictures of what composition does to an image.

For each layer one: where a query patch looks, per head, before and after each composition. For the model one more: the
compositions, averaged over all pairs.
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
    """What is looked at.

    Attributes:
        pixels: The image, uint8 [3, size, size].
        grid: Rows and columns of its patches.
        prefix: Tokens before the patches (class token, registers).
        query: Which patch looks, counted row by row; the middle one if None.
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
            accepted = f"accepted: 0 to {rows * columns - 1}, the patches of {rows} x {columns}"
            raise UserError(f"query={self.query}; {accepted}.")

    def check(self, recorded: dict[str, Recorded]) -> None:
        """Check that each layer attends to all the tokens at once.

        Raises:
            UserError: If one does not.
        """
        rows, columns = self.grid
        for name, one in recorded.items():
            images, _, *tokens = one.maps.weights.shape
            if images != 1 or tokens != [self.prefix + rows * columns] * 2:
                raise UserError(
                    f"{name} attends within {images} x {tokens[1]} tokens; expected layers that attend to all "
                    f"{rows} x {columns} patches and {self.prefix} more at once (not to windows)."
                )


def draw_attention(recorded: dict[str, Recorded], view: AttentionView) -> dict[str, Figure]:
    """Draw one picture per recorded layer, and one of all compositions if there are any.

    Args:
        recorded: One image's maps, from `dcmha.record_attention`.
        view: That image, and which of its patches looks.

    Returns:
        The pictures, by the name of the layer; "compositions" is the last.

    Raises:
        UserError: If a layer does not attend to all tokens at once.
    """
    view.check(recorded)
    figures = {name: _draw_layer(name, one, view) for name, one in recorded.items()}
    if any(m is not None for one in recorded.values() for m in (one.pre_composition, one.post_composition)):
        figures["compositions"] = _draw_compositions(recorded)
    return figures


def patch_grid(model: nn.Module, size: int) -> tuple[int, int]:
    """Tell into how many rows and columns of patches a model of timm cuts an image of this size.

    Raises:
        UserError: If the model has no patches.
    """
    embed = getattr(model, "patch_embed", None)
    if hasattr(embed, "dynamic_feat_size"):
        return embed.dynamic_feat_size((size, size))
    if hasattr(getattr(model, "embeds", None), "patch_size"):  # NaFlexViT
        height, width = model.embeds.patch_size
        return size // height, size // width
    raise UserError(f"{type(model).__name__} cuts no patches that can be drawn.")


def prefix_tokens(model: nn.Module) -> int:
    """Tell how many tokens (class token, registers) a model of timm puts before the patches."""
    return getattr(model, "num_prefix_tokens", 0)


def log_figures(writer: SummaryWriter, figures: dict[str, Figure], step: int) -> None:
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
    with as_user_error(f"the image {path} cannot be read"):
        pixels = decode(check_regular(Path(path)).read_bytes())
    return eval_transform(size, crop_fraction=1.0)(pixels)


def _draw_layer(name: str, one: Recorded, view: AttentionView) -> Figure:
    """Draw, for every head, where the query looks before any composition, after the first, and after both."""
    maps = {"uncomposed": one.uncomposed_weights}
    if one.pre_composition is not None:
        maps["pre-composed"] = one.maps.weights
    if one.post_composition is not None:
        maps["post-composed"] = one.maps.composed_weights
    pixels, grid, prefix, query = view.pixels, view.grid, view.prefix, view.query
    looks = {label: weights[0, :, prefix + query, prefix:].cpu().unflatten(-1, grid) for label, weights in maps.items()}
    heads = len(looks["uncomposed"])
    limit = max(float(values.abs().max()) for values in looks.values())
    figure = Figure(figsize=(max(6.0, 1.6 * (heads + 1)), 1.8 * len(looks) + 0.3), layout="constrained")
    figure.suptitle(f"{name}: where patch {query} looks (red: positive, blue: negative)", fontsize=11)
    axes = figure.subplots(len(looks), heads + 1, squeeze=False)
    height, width = pixels.shape[1] / grid[0], pixels.shape[2] / grid[1]
    row, column = divmod(query, grid[1])
    for line, (label, values) in zip(axes, looks.items(), strict=True):
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
    """Draw the compositions of all layers, without the identity, averaged over the pairs of the image."""
    matrices = [(one.pre_composition, one.post_composition) for one in recorded.values()]
    changes = [[None if m is None else m.cpu() - torch.eye(len(m)) for m in pair] for pair in matrices]
    limit = max((float(m.abs().max()) for pair in changes for m in pair if m is not None), default=1.0) or 1.0
    figure = Figure(figsize=(max(6.0, 1.8 * len(changes) + 1.2), 4.4), layout="constrained")
    figure.suptitle("mean composition less the identity: from head (row) to head (column)", fontsize=11)
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

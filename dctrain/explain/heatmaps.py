"""Heat maps of matrices for all explanations."""

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

LINE = 60  # characters of labels that fit side by side


def draw_map(
    axes: Axes,
    values: np.ndarray,
    title: str,
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    has_numbers: bool = False,
) -> None:
    """Plot a matrix with a color bar: positive values red, negative values blue.

    Args:
        axes: Axes of the plot.
        values: The matrix; NaN cells are empty.
        title: Title.
        rows: Row labels; indices if None.
        columns: Column labels; indices if None.
        has_numbers: Whether to write the numbers into the cells.
    """
    limit = float(np.nanmax(np.abs(values))) or 1.0
    colors = {"cmap": "RdBu_r", "vmin": -limit} if np.nanmin(values) < 0 else {"cmap": "Reds", "vmin": 0.0}
    drawn = axes.imshow(values, **colors, vmax=limit, aspect="auto", interpolation="nearest")
    for (row, column), value in np.ndenumerate(values) if has_numbers else ():
        color = "white" if abs(value) > 0.6 * limit else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=color)
    axes.set_title(title, fontsize=9, parse_math=False)
    for axis, labels in ((axes.yaxis, rows), (axes.xaxis, columns)):
        if labels is None:
            axis.set_major_locator(MaxNLocator(integer=True))
            axis.set_tick_params(labelsize=7)
            continue
        shown = [label.replace("\n", "\\n") for label in labels]
        turned = 90 if axis is axes.xaxis and sum(map(len, shown)) > LINE else 0
        axis.set_ticks(range(len(labels)), shown, rotation=turned, fontsize=7, parse_math=False)
    axes.figure.colorbar(drawn, ax=axes)


def draw_over(axes: Axes, values: np.ndarray, title: str, image: np.ndarray) -> None:
    """Plot values of patches over their image with a color bar: positive red, negative blue.

    Args:
        axes: Axes of the plot.
        values: Value of each patch [rows, columns].
        title: Title.
        image: uint8 [height, width, 3].
    """
    limit = float(np.abs(values).max()) or 1.0
    rows, columns = values.shape
    place = {"extent": (-0.5, columns - 0.5, rows - 0.5, -0.5), "interpolation": "nearest"}
    axes.imshow(image, **place)
    strength = 0.8 * np.abs(values) / limit
    drawn = axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, alpha=strength, **place)
    axes.set_title(title, fontsize=9, parse_math=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
        axis.set_tick_params(labelsize=7)
    bar = axes.figure.colorbar(drawn, ax=axes)
    bar.solids.set_alpha(1.0)


def by_layer(heads: Iterable[tuple[str, int, float]]) -> tuple[list[str], np.ndarray]:
    """Arrange values of heads, given as (layer, head, value), as a matrix with one row per layer."""
    found: dict[str, dict[int, float]] = {}
    for layer, head, value in heads:
        found.setdefault(layer, {})[head] = value
    values = np.full((len(found), 1 + max(head for row in found.values() for head in row)), np.nan)
    for line, row in zip(values, found.values(), strict=True):
        line[list(row)] = list(row.values())
    return list(found), values


def draw_heads(maps: dict[str, list[tuple[str, int, float]]], title: str) -> Figure:
    """Plot several named heat maps of heads.

    Args:
        maps: Values of heads for each map, as in `by_layer`.
        title: Meaning of the values.
    """
    count = max(len(by_layer(heads)[0]) for heads in maps.values())
    figure = Figure(figsize=(1 + 4.5 * len(maps), 2 + 0.25 * count), layout="constrained")
    figure.suptitle(title, fontsize=10, parse_math=False)
    for axes, (name, heads) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps.items(), strict=True):
        layers, values = by_layer(heads)
        draw_map(axes, values, name, rows=layers)
        axes.set_xlabel("head")
    return figure

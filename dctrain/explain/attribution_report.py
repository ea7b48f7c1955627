"""Report of integrated gradients as a table and a figure."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from ..utils.markdown import markdown_table
from .attribution import Attribution
from .explanation import Explanation
from .heatmaps import draw_map, draw_over

PATCHES = "patches"  # kind whose parts are positions of an image, by rows and columns
SHOWN = 8  # parts per kind in the printed table


class AttributionRow(NamedTuple):
    """Attribution of a part, the `number`th of its kind, and, if computed, the decrease if only it is disabled."""

    kind: str
    number: int
    layer: str
    name: str
    value: float
    alone: float | None


class AttributionSums(NamedTuple):
    """Totals of a kind: values with all and without any parts, integration error, and rank correlation with the
    single-part decreases (Spearman; None if not computed).
    """

    kind: str
    whole: float
    without: float
    gap: float
    rank_correlation: float | None


def explain_attribution(found: Sequence[Attribution], what: str, image: np.ndarray | None = None) -> Explanation:
    """Explain an attribution.

    Args:
        found: Attributions of one number.
        what: Description of the scalar.
        image: The image for attributions to patches, uint8 [height, width, 3]; None if there is none.
    """
    rows = [row for a in found for row in _rows(a)]
    sums = [AttributionSums(a.parts.kind, a.whole, a.without, a.gap, a.rank_correlation) for a in found]
    figures, tables = {"attribution": _draw(found, what, image)}, {"attribution": rows, "attribution-sums": sums}
    reading = (
        f"Integrated gradients of the {what} with respect to each part. A positive attribution means that the part"
        " increases it; the attributions of a kind sum to the joint effect of all its parts."
    )
    return Explanation(what, reading, "\n\n".join(map(_tell, found)), figures, tables)


def _rows(a: Attribution) -> list[AttributionRow]:
    alone = [None] * len(a.values) if a.alone is None else a.alone.tolist()
    parts = zip(a.parts.layers, a.parts.names, a.values.tolist(), alone, strict=True)
    return [AttributionRow(a.parts.kind, number, *part) for number, part in enumerate(parts)]


def _tell(a: Attribution) -> str:
    """Format a table of the largest attributions, sums by layer, and the integration error."""
    kind, rows = a.parts.kind, sorted(_rows(a), key=lambda row: -abs(row.value))[:SHOWN]
    heads = [f"{kind}, largest", "attribution", *(["decrease if disabled"] if a.alone is not None else [])]
    lines = [[f"{row.layer} {row.name}".strip(), *(f"{x:+.4f}" for x in row[4:] if x is not None)] for row in rows]
    message = [markdown_table(heads, lines)]
    if kind == "branches":
        message.append(f"Attributions by layer: {', '.join(f'{name} {x:+.4f}' for name, x in _by_layer(a).items())}.")
    sums = f"{a.whole:.4f}; with all {kind} disabled {a.without:.4f}; integration error {a.gap:+.1e}"
    message.append(f"Full model {sums}.")
    if a.rank_correlation is not None:
        message.append(f"Rank correlation of attributions and single-part decreases: {a.rank_correlation:+.2f}.")
    return "\n\n".join(message)


def _by_layer(a: Attribution) -> dict[str, float]:
    """Sum the attributions of each layer."""
    found = dict.fromkeys(a.parts.layers, 0.0)
    for layer, value in zip(a.parts.layers, a.values.tolist(), strict=True):
        found[layer] += value
    return found


def _draw(found: Sequence[Attribution], what: str, image: np.ndarray | None) -> Figure:
    """Plot a heat map per kind, one row per layer, or a single row without layers; patches are drawn over the image."""
    maps = [_map(a) for a in found]
    heights = [4.0 if a.parts.kind == PATCHES else max(1.2, 0.32 * len(m[0])) for a, m in zip(found, maps, strict=True)]
    figure = Figure(figsize=(9, sum(heights) + 1.4 * len(maps) + 0.4), layout="constrained")
    figure.suptitle(what, fontsize=10, parse_math=False)
    cells = figure.subplots(len(maps), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, a, (layers, names, values) in zip(cells, found, maps, strict=True):
        if a.parts.kind == PATCHES and image is not None:
            draw_over(axes, values, f"{PATCHES}: credit", image)
        else:
            draw_map(axes, values, f"{a.parts.kind}: attribution", rows=layers, columns=names)
    return figure


def _map(a: Attribution) -> tuple[list[str], list[str], np.ndarray]:
    """Arrange parts by layers and names; tokens, which may repeat, in one row."""
    layers = list(dict.fromkeys(a.parts.layers))
    if len(layers) == 1:
        return layers, list(a.parts.names), a.values.numpy()[None]
    names = list(dict.fromkeys(a.parts.names))
    values = np.full((len(layers), len(names)), np.nan)
    for row in _rows(a):
        values[layers.index(row.layer), names.index(row.name)] = row.value
    return layers, names, values

"""What integrated gradients found, as a table and a picture."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from ..markdown import markdown_table
from .attribution import Attribution
from .explanation import Explanation
from .maps import draw_map

SHOWN = 8  # of the parts of a kind, in the printed table


class Row(NamedTuple):
    """What a part, the `number`th of its kind, is credited with; see `Attribution`."""

    kind: str
    number: int
    layer: str
    name: str
    value: float


class Sums(NamedTuple):
    """What the credits of a kind should sum up to, whole - without, and by how much they miss it."""

    kind: str
    whole: float
    without: float
    gap: float


def explain_attribution(found: Sequence[Attribution], what: str) -> Explanation:
    """Tell what matters most.

    Args:
        found: Attributions of one number.
        what: The number, in words.
    """
    rows = [
        Row(a.kind, number, *part)
        for a in found
        for number, part in enumerate(zip(a.layers, a.names, a.values.tolist(), strict=True))
    ]
    sums = [Sums(a.kind, a.whole, a.without, a.gap) for a in found]
    pictures, tables = {"attribution": _draw(found, what)}, {"attribution": rows, "attribution-sums": sums}
    return Explanation(what, "\n\n".join(map(_table, found)), pictures, tables)


def _table(a: Attribution) -> str:
    order = a.values.abs().argsort(descending=True)[:SHOWN].tolist()
    lines = [[" ".join(filter(None, (a.layers[i], a.names[i]))), f"{float(a.values[i]):+.4f}"] for i in order]
    table = markdown_table([f"{a.kind}, the most", "credit"], lines)
    sums = f"{a.whole:.4f}; without all {a.kind} {a.without:.4f}; the credits miss the difference by {a.gap:+.1e}"
    return f"{table}\n\nWith everything {sums}."


def _draw(found: Sequence[Attribution], what: str) -> Figure:
    """Draw a map for each kind: a row for each layer, or one where there are none."""
    maps = [_map(a) for a in found]
    heights = [max(1.2, 0.32 * len(layers)) for layers, *_ in maps]
    figure = Figure(figsize=(9, sum(heights) + 1.4 * len(maps) + 0.4), layout="constrained")
    figure.suptitle(what, fontsize=10, parse_math=False)
    cells = figure.subplots(len(maps), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, a, (layers, names, values) in zip(cells, found, maps, strict=True):
        draw_map(axes, values, f"{a.kind}: credit", rows=layers, columns=names)
    return figure


def _map(a: Attribution) -> tuple[list[str], list[str], np.ndarray]:
    """Arrange parts by layers and names; tokens, of which two may be alike, in one row."""
    layers = list(dict.fromkeys(a.layers))
    if len(layers) == 1:
        return layers, list(a.names), a.values.numpy()[None]
    names = list(dict.fromkeys(a.names))
    values = np.full((len(layers), len(names)), np.nan)
    for layer, name, value in zip(a.layers, a.names, a.values.tolist(), strict=True):
        values[layers.index(layer), names.index(name)] = value
    return layers, names, values

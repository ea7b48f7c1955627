"""Report of composition statistics over a data set as a table and a figure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from dcmha.analysis import BRANCHES, Mixing, MixingMeter

from ..utils.markdown import markdown_table
from .explanation import Explanation

SHARES = ("static", "query", "key")
COMPOSITIONS = ("pre", "post")


class MixingRow(NamedTuple):
    """One statistic of the composition of a layer; see `dcmha.analysis.Mixing`.

    Attributes:
        layer: Name of the layer.
        composition: "pre" or "post".
        what: "size of BRANCH" (relative to the identity), "effective rank", or "share of static", "query" or "key".
        mean: The value, or its mean.
        std: Its standard deviation over tokens or pairs; 0 for shares.
    """

    layer: str
    composition: str
    what: str
    mean: float
    std: float


def explain_mixing(meters: Mapping[str, Mapping[str, MixingMeter]], what: str) -> Explanation:
    """Explain composition statistics, one line per composition.

    Args:
        meters: Result of `dcmha.analysis.measure_mixing`.
        what: Description of the data.
    """
    found = {(name, of): meter.mixing() for name, both in meters.items() for of, meter in both.items()}
    rows = [row for key, mixing in found.items() for row in _rows(*key, mixing)]
    reading = (
        "How much each composition changes scores (pre) or weights (post), by branch. A size of 1 means that a branch"
        " adds as much as the identity keeps; the shares tell how much depends on the query or the key and how much is "
        "static."
    )
    return Explanation(what, reading, _table(found), {"mixing": _draw(found, what)}, {"mixing": rows})


def _rows(layer: str, composition: str, mixing: Mixing) -> list[MixingRow]:
    sizes = [MixingRow(layer, composition, f"size of {branch}", *size) for branch, size in mixing.sizes.items()]
    shares = [MixingRow(layer, composition, f"share of {name}", share, 0.0) for name, share in mixing.shares.items()]
    return [*sizes, MixingRow(layer, composition, "effective rank", *mixing.effective_rank), *shares]


def _table(found: Mapping[tuple[str, str], Mixing]) -> str:
    branches, lines = _branches(found), []
    for (layer, composition), mixing in found.items():
        of = [mixing.sizes.get(branch) for branch in branches]
        sizes = ["-" if size is None else f"{size.mean:.2f} ({size.std:.2f})" for size in of]
        shares = " / ".join(f"{100 * mixing.shares[name]:.0f}" for name in SHARES)
        lines.append([layer, composition, *sizes, f"{mixing.effective_rank.mean:.1f}", shares])
    header = ["layer", "", *branches, "effective rank", "static / query / key, %"]
    message = "Sizes: norm of a branch's matrix relative to the identity's; mean (standard deviation) over tokens."
    return f"{markdown_table(header, lines)}\n\n{message}"


def _branches(found: Mapping[tuple[str, str], Mixing]) -> list[str]:
    """Return the branches of all compositions."""
    return [branch for branch in BRANCHES if any(branch in mixing.sizes for mixing in found.values())]


def _draw(found: Mapping[tuple[str, str], Mixing], what: str) -> Figure:
    """Plot the sizes of the branches by layer, and the shares, for each composition."""
    layers = list(dict.fromkeys(layer for layer, _ in found))
    figure = Figure(figsize=(11, 1.8 + 0.55 * len(layers)), layout="constrained")
    figure.suptitle(what, fontsize=10, parse_math=False)
    cells = figure.subplots(1, 4, sharey=True, width_ratios=(1.3, 1, 1.3, 1))
    limit = max(size.mean for mixing in found.values() for size in mixing.sizes.values()) or 1.0
    for composition, sizes, shares in zip(COMPOSITIONS, cells[::2], cells[1::2], strict=True):
        of_kind = [found.get((layer, composition)) for layer in layers]
        drawn = _draw_sizes(sizes, of_kind, _branches(found), limit)
        _draw_shares(shares, of_kind)
        sizes.set_title(f"{composition}-composition: size of branches", fontsize=9)
        shares.set_title("dependence", fontsize=9)
    cells[0].set_yticks(range(len(layers)), layers, fontsize=8)
    figure.colorbar(drawn, ax=list(cells), shrink=0.8, label="norm relative to the identity")
    figure.legend(*cells[1].get_legend_handles_labels(), loc="outside lower right", ncols=3, fontsize=8)
    return figure


def _draw_sizes(axes: Axes, mixings: Sequence[Mixing | None], branches: Sequence[str], limit: float) -> AxesImage:
    values = np.array([[m.sizes[b].mean if m and b in m.sizes else np.nan for b in branches] for m in mixings])
    drawn = axes.imshow(values, cmap="viridis", vmin=0, vmax=limit, aspect="auto", interpolation="nearest")
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            color = "black" if value > 0.6 * limit else "white"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    axes.set_xticks(range(len(branches)), [branch.replace(" ", "\n") for branch in branches], fontsize=7)
    return drawn


def _draw_shares(axes: Axes, mixings: Sequence[Mixing | None]) -> None:
    start = np.zeros(len(mixings))
    for name, color in zip(SHARES, ("C7", "C0", "C1"), strict=True):
        share = np.array([m.shares[name] if m else 0.0 for m in mixings])
        axes.barh(range(len(mixings)), share, left=start, color=color, label=name)
        start += share
    axes.set_xlim(0, 1)
    axes.tick_params(labelsize=7)

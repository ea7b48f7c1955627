"""Figures 7 and 8 of the paper: the composition of one query-key pair, term by term, and what heads look at."""

# S key tokens, H heads, R compose rank, G head groups

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor, nn

from dcmha.analysis import Breakdown, Recorded, record_attention
from dcmha.analysis.breakdown import ITSELF
from dcmha.impl.reference import compose

from ..utils.markdown import markdown_table
from .explanation import Explanation
from .heatmaps import draw_map

PAPER = {"query projection": "o_qp", "query gate": "o_qg", "key projection": "o_kp", "key gate": "o_kg"}
TOKENS = 48  # that are drawn: those which the query looks at most


class BreakdownRow(NamedTuple):
    """A term of one head; see `dcmha.analysis.Breakdown`."""

    term: str
    head: int
    value: float


class QueryKeyPair(NamedTuple):
    """What is looked at.

    Attributes:
        layer: Name of the layer.
        composition: "pre" or "post".
        query: Position of the token that looks.
        key: Position of the token that it looks at.
        words: What the tokens are called [S].
        prefix: Tokens before those that are counted.
    """

    layer: str
    composition: str
    query: int
    key: int
    words: Sequence[str]
    prefix: int = 0

    @property
    def title(self) -> str:
        """Say it in words."""
        query, key = (f"{self.words[at]!r} ({at - self.prefix})" for at in (self.query, self.key))
        return f"{self.layer}, {self.composition}-composition, from {query} to {key}"


def record_pair(
    model: nn.Module,
    call: Callable[[], object],
    layers: Sequence[str],
    composition: str,
    query: int,
    check: Callable[[Recorded], None] = lambda recorded: None,
) -> tuple[str, Recorded, int]:
    """Record the layer, of some, that changes what a query looks at most.

    Args:
        model: The model.
        call: Calls it on one sequence; twice, so that the maps of one layer at a time are in memory.
        layers: Names of the layers.
        composition: "pre" or "post".
        query: Position of the token that looks.
        check: Looks at what is recorded of each layer.

    Returns:
        The layer's name, what was recorded of it, and the position of the key whose scores or weights change most.

    Raises:
        ValueError: If a layer's weights are not finite.
    """

    def keep(one: Recorded) -> tuple[int, float]:
        check(one)
        if not one.maps.composed_weights.isfinite().all():
            raise ValueError("attention is not finite: the model's weights are damaged, or too large.")
        return most_changed(one, composition, query)

    with record_attention(model, layers, keep) as changes:
        call()
    chosen = max(changes, key=lambda name: changes[name][1])
    with record_attention(model, [chosen]) as recorded:
        call()
    return chosen, recorded[chosen], changes[chosen][0]


def explain_breakdown(recorded: Recorded, pair: QueryKeyPair) -> Explanation:
    """Tell the terms of a pair.

    Args:
        recorded: The layer's call on one sequence.
        pair: Which pair.

    Raises:
        ValueError: If the layer has no such composition, there is no such pair, or the query does not see the key.
    """
    if not _seen(recorded, pair.query)[pair.key]:
        raise ValueError(f"key={pair.key} is hidden from query={pair.query} by a mask.")
    found = recorded.breakdown(pair.composition, pair.query, pair.key)
    columns = _columns(found)
    rows = [
        BreakdownRow(name, head, value)
        for name, values in columns.items()
        for head, value in enumerate(values.tolist())
    ]
    names = [name if name not in PAPER else f"{name} ({PAPER[name]})" for name in columns]
    lines = [
        [f"head {head}", *(f"{float(values[head]):+.4f}" for values in columns.values())]
        for head in range(len(found.before))
    ]
    inner = [
        f"{side} {[round(value, 4) for value in values.flatten().tolist()]}" for side, values in found.inner.items()
    ]
    said = f"\n\nInner values of the projections: {', '.join(inner)}" if inner else ""
    pictures, tables = {"breakdown": _draw(recorded, found, pair)}, {"breakdown": rows}
    reading = (
        "The composition of one query and one key, term by term: the scores or weights of all heads before, what each "
        "branch adds, and what comes out. Each row is a head, and the terms of a row sum up to its last column."
    )
    return Explanation(pair.title, reading, f"{markdown_table(['', *names], lines)}{said}", pictures, tables)


def _columns(found: Breakdown) -> dict[str, Tensor]:
    """Name what is shown of each head: before, what is added, after."""
    added = {name: term for name, term in found.terms.items() if name != ITSELF}
    return {"before": found.before, **added, "after": found.after}


def most_changed(recorded: Recorded, composition: str, query: int) -> tuple[int, float]:
    """Find the key whose scores or weights a composition changes most, in any head; return it and by how much.

    Keys that the query does not see do not count.
    """
    before, weights = {
        "pre": (recorded.maps.scores, recorded.pre),
        "post": (recorded.maps.weights, recorded.post),
    }[composition]
    added = compose(before, weights, recorded.num_groups) - before  # without a floating mask
    change = added[0, :, query].abs().amax(0) * _seen(recorded, query)
    return int(change.argmax()), float(change.max())


def _seen(recorded: Recorded, query: int) -> Tensor:
    """Tell which keys a query sees [S]."""
    return (recorded.maps.weights[0, :, query] > 0).any(0)


def _draw(recorded: Recorded, found: Breakdown, pair: QueryKeyPair) -> Figure:
    """Draw the terms, the matrices of the pair, and what heads look at before and after."""
    heads, shown = len(found.before), _shown(recorded, pair)
    labels = [pair.words[at] for at in shown]
    wide, high = 0.22 * max(len(shown), 2 * heads), 0.18 * heads
    figure = Figure(figsize=(4 + wide, 7 + 5 * high), layout="constrained")
    figure.suptitle(pair.title, fontsize=10, parse_math=False)
    brought = _brought(recorded, pair, shown)
    parts = figure.subfigures(
        3 if brought is None else 4, 1, height_ratios=[1.2, 1, 1, 1.4][: 3 if brought is None else 4]
    )
    brings, rows = _matrices(found)
    cells = parts[0].subplots(1, 2, width_ratios=(1.4, 1)) if brings else [parts[0].subplots()]
    columns = _columns(found)
    values = np.stack([column.numpy(force=True) for column in columns.values()], 1)
    names = [PAPER.get(name, name) for name in columns]
    draw_map(cells[0], values, "terms (heads by rows)", columns=names, has_numbers=heads <= 16)
    if len(cells) > 1:
        draw_map(cells[1], np.stack(rows, 1), "what the two tokens bring", columns=brings)
    for part, (title, drawn) in zip(parts[1:], _looks(recorded, pair).items(), strict=False):
        looks = drawn[0, :, pair.query, shown].numpy(force=True)
        draw_map(part.subplots(), looks, f"{title}: heads by tokens", columns=labels)
    if brought is not None:
        title = "what tokens bring as keys, w_k1 (figure 8): components and heads by tokens"
        draw_map(parts[-1].subplots(), brought, title, columns=labels)
    return figure


def _looks(recorded: Recorded, pair: QueryKeyPair) -> dict[str, Tensor]:
    """Choose what shows where heads look without the composition, and with it."""
    maps = recorded.maps
    if pair.composition == "pre":
        return {"weights without any composition": recorded.uncomposed_weights, "after pre-composition": maps.weights}
    return {"weights before post-composition": maps.weights, "after": maps.composed_weights}


def _brought(recorded: Recorded, pair: QueryKeyPair, shown: Sequence[int]) -> np.ndarray | None:
    """Take the first matrices of the keys' projections along the sequence [R H, S]; None if there are none."""
    weights = recorded.pre if pair.composition == "pre" else recorded.post
    down = weights.key.down
    return None if down is None else down[0, shown].flatten(1).mT.numpy(force=True)


def _shown(recorded: Recorded, pair: QueryKeyPair) -> list[int]:
    """Choose the tokens to draw, in their order."""
    looked = recorded.maps.composed_weights[0, :, pair.query].abs().amax(0)
    most = looked.argsort(descending=True)[:TOKENS].tolist()
    return sorted({*most, pair.key})


def _matrices(found: Breakdown) -> tuple[list[str], list[np.ndarray]]:
    """Name and list what the tokens of a pair bring, each row [H]; nothing if the composition is static."""
    rows = {}
    for name, side in (("q", found.weights.query), ("k", found.weights.key)):
        if side.down is not None:
            rows |= {f"w_{name}1[{r}]": side.down[0, 0, r] for r in range(side.down.shape[2])}
            rows |= {f"w_{name}2[{r}]": side.up[0, 0, r] for r in range(side.up.shape[2])}
        if side.gate is not None:
            rows[f"w_{name}g"] = side.gate[0, 0]
    return list(rows), [row.numpy(force=True) for row in rows.values()]

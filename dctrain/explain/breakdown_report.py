"""Figures 7 and 8 of the paper: terms of the composition of one query-key pair, and attention of the heads."""

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
TOKENS = 48  # maximum tokens in the figure: those with the largest attention of the query


class BreakdownRow(NamedTuple):
    """A term for one head; see `dcmha.analysis.Breakdown`."""

    term: str
    head: int
    value: float


class QueryKeyPair(NamedTuple):
    """A query-key pair of a layer.

    Attributes:
        layer: Name of the layer.
        composition: "pre" or "post".
        query: Position of the query.
        key: Position of the key.
        words: Names of the tokens [S].
        prefix: Number of tokens before those that are counted.
    """

    layer: str
    composition: str
    query: int
    key: int
    words: Sequence[str]
    prefix: int = 0

    @property
    def title(self) -> str:
        """Description of the pair."""
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
    """Record the layer whose composition changes the attention of a query most.

    Args:
        model: The model.
        call: Calls the model on one sequence; it is called twice, so that only one layer's maps are in memory.
        layers: Names of the layers.
        composition: "pre" or "post".
        query: Position of the query.
        check: Checks the recorded call of each layer.

    Returns:
        Name and recorded call of the layer, and the position of the key whose scores or weights change most.

    Raises:
        ValueError: If a layer's weights are not finite.
    """

    def keep(one: Recorded) -> tuple[int, float]:
        check(one)
        if not one.maps.composed_weights.isfinite().all():
            raise ValueError("attention is not finite: the model's weights are damaged or too large.")
        return most_changed(one, composition, query)

    with record_attention(model, layers, keep) as changes:
        call()
    chosen = max(changes, key=lambda name: changes[name][1])
    with record_attention(model, [chosen]) as recorded:
        call()
    return chosen, recorded[chosen], changes[chosen][0]


def explain_breakdown(recorded: Recorded, pair: QueryKeyPair) -> Explanation:
    """Explain the terms of a pair.

    Args:
        recorded: Recorded call of the layer on one sequence.
        pair: The pair.

    Raises:
        ValueError: If the composition is disabled, the pair does not exist, or the key is hidden from the query.
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
    message = f"\n\nInner values of the projections: {', '.join(inner)}" if inner else ""
    figures, tables = {"breakdown": _draw(recorded, found, pair)}, {"breakdown": rows}
    reading = (
        "Composition of one query and one key, term by term: the scores or weights of all heads before it, the term "
        "of each branch, and the result. Each row is a head; its terms sum to the last column."
    )
    return Explanation(pair.title, reading, f"{markdown_table(['', *names], lines)}{message}", figures, tables)


def _columns(found: Breakdown) -> dict[str, Tensor]:
    """Columns of the table: before, terms, after."""
    added = {name: term for name, term in found.terms.items() if name != ITSELF}
    return {"before": found.before, **added, "after": found.after}


def most_changed(recorded: Recorded, composition: str, query: int) -> tuple[int, float]:
    """Return the key whose scores or weights a composition changes most in any head, and the change.

    Hidden keys are excluded.
    """
    before, weights = {
        "pre": (recorded.maps.scores, recorded.pre),
        "post": (recorded.maps.weights, recorded.post),
    }[composition]
    added = compose(before, weights, recorded.num_groups) - before  # without a floating mask
    change = added[0, :, query].abs().amax(0) * _seen(recorded, query)
    return int(change.argmax()), float(change.max())


def _seen(recorded: Recorded, query: int) -> Tensor:
    """Mask of the keys visible to a query [S]."""
    return (recorded.maps.weights[0, :, query] > 0).any(0)


def _draw(recorded: Recorded, found: Breakdown, pair: QueryKeyPair) -> Figure:
    """Plot the terms, the compose weights of the pair, and the attention of the heads before and after."""
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
        draw_map(cells[1], np.stack(rows, 1), "compose weights of the two tokens", columns=brings)
    for part, (title, drawn) in zip(parts[1:], _looks(recorded, pair).items(), strict=False):
        attention = drawn[0, :, pair.query, shown].numpy(force=True)
        draw_map(part.subplots(), attention, f"{title}: heads by tokens", columns=labels)
    if brought is not None:
        title = "key-side weights of the tokens, w_k1 (figure 8): components and heads by tokens"
        draw_map(parts[-1].subplots(), brought, title, columns=labels)
    return figure


def _looks(recorded: Recorded, pair: QueryKeyPair) -> dict[str, Tensor]:
    """Return the attention weights without and with the composition."""
    maps = recorded.maps
    if pair.composition == "pre":
        return {"weights without any composition": recorded.uncomposed_weights, "after pre-composition": maps.weights}
    return {"weights before post-composition": maps.weights, "after": maps.composed_weights}


def _brought(recorded: Recorded, pair: QueryKeyPair, shown: Sequence[int]) -> np.ndarray | None:
    """Return the keys' down projections along the sequence [R H, S]; None if there are none."""
    weights = recorded.pre if pair.composition == "pre" else recorded.post
    down = weights.key.down
    return None if down is None else down[0, shown].flatten(1).mT.numpy(force=True)


def _shown(recorded: Recorded, pair: QueryKeyPair) -> list[int]:
    """Select the tokens to plot, in order."""
    looked = recorded.maps.composed_weights[0, :, pair.query].abs().amax(0)
    most = looked.argsort(descending=True)[:TOKENS].tolist()
    return sorted({*most, pair.key})


def _matrices(found: Breakdown) -> tuple[list[str], list[np.ndarray]]:
    """Return names and compose weights of the tokens of a pair, each row [H]; empty for a static composition."""
    rows = {}
    for name, side in (("q", found.weights.query), ("k", found.weights.key)):
        if side.down is not None:
            rows |= {f"w_{name}1[{r}]": side.down[0, 0, r] for r in range(side.down.shape[2])}
            rows |= {f"w_{name}2[{r}]": side.up[0, 0, r] for r in range(side.up.shape[2])}
        if side.gate is not None:
            rows[f"w_{name}g"] = side.gate[0, 0]
    return list(rows), [row.numpy(force=True) for row in rows.values()]

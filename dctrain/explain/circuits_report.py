"""Report of what heads write (OV circuits) for tokens or images, and how well it matches relations."""

# N tokens or images, V outputs: the vocabulary or the classes

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ..errors import UserError
from ..utils.markdown import markdown_table
from .explanation import Explanation
from .heatmaps import draw_heads

SHOWN = 10  # heads in the printed tables


class HeadWrites(NamedTuple):
    """The `rank`th largest logit that a head writes for a token or a class of images."""

    layer: str
    head: int
    source: str
    rank: int
    writes: str
    logit: float


class RelationScore(NamedTuple):
    """How well a head matches a relation.

    Attributes:
        layer: Name of the layer.
        head: Index of the head.
        relation: Name of the relation.
        in_top: Share of the sources whose partner is among the `top` largest logits.
        mean_reciprocal_rank: Mean of 1 / rank of the partner; ties get the last rank.
        count: Number of sources.
    """

    layer: str
    head: int
    relation: str
    in_top: float
    mean_reciprocal_rank: float
    count: int


def list_written(
    layer: str, head: int, sources: Sequence[str], logits: Tensor, name: Callable[[int], str], top: int
) -> list[HeadWrites]:
    """Return the largest of the logits [N, V] that a head writes for each source."""
    values, ids = logits.topk(min(top, logits.shape[1]))
    return [
        HeadWrites(layer, head, source, rank, name(token), value)
        for source, *row in zip(sources, ids.tolist(), values.tolist(), strict=True)
        for rank, (token, value) in enumerate(zip(*row, strict=True), 1)
    ]


def score_head(layer: str, head: int, relation: str, logits: Tensor, partners: Tensor, top: int) -> RelationScore:
    """Score a head by the logits [N, V] that it writes for sources, and their partners [N].

    Raises:
        UserError: If logits are NaN.
    """
    if logits.isnan().any():
        raise UserError("the output of a head is NaN: the weights are damaged or too large for their dtype.")
    own = logits.gather(1, partners.to(logits.device)[:, None])
    ranks = (logits >= own).sum(1).double()  # ties get the last rank, so that a head that writes zeros scores low
    return RelationScore(
        layer, head, relation, float((ranks <= top).double().mean()), float((1 / ranks).mean()), len(ranks)
    )


def explain_circuits(scores: Sequence[RelationScore], written: Sequence[HeadWrites], top: int) -> Explanation:
    """Explain the best heads of each relation and what they write."""
    relations = list(dict.fromkeys(score.relation for score in scores))
    maps = {name: [(s.layer, s.head, s.in_top) for s in scores if s.relation == name] for name in relations}
    title = f"share of sources whose partner is in a head's top {top}"
    message = [table for name in relations for table in _tables(name, _best(scores, name), written, top)]
    tables = {"heads": scores} | ({"circuits": written} if written else {})
    reading = (
        "The output of each head for a source, computed from its value and output matrices only. A high share means "
        "that the head writes the partner given by the relation."
    )
    return Explanation("What heads write", reading, "\n\n".join(message), {"heads": draw_heads(maps, title)}, tables)


def _best(scores: Sequence[RelationScore], relation: str) -> list[RelationScore]:
    of_relation = [score for score in scores if score.relation == relation]
    return sorted(of_relation, key=lambda score: -score.mean_reciprocal_rank)[:SHOWN]


def _tables(relation: str, best: Sequence[RelationScore], written: Sequence[HeadWrites], top: int) -> Iterator[str]:
    """Format the best heads of a relation, and what the first of them writes."""
    lines = [
        [f"{score.layer} head {score.head}", f"{100 * score.in_top:.1f} %", f"{score.mean_reciprocal_rank:.3f}"]
        for score in best
    ]
    yield markdown_table([f"{relation}, {best[0].count}", f"partner among {top}", "mean reciprocal rank"], lines)
    rows: dict[str, list[str]] = {}
    for one in written:
        if (one.layer, one.head) == (best[0].layer, best[0].head):
            rows.setdefault(one.source, []).append(one.writes)
    if rows:
        lines = [[repr(source), " ".join(map(repr, writes))] for source, writes in rows.items()]
        yield markdown_table([f"{best[0].layer} head {best[0].head}, best by {relation}", "writes"], lines)

"""The terms of the composition of one query-key pair (paper, equation 7 and figure 7)."""

# B batch, T query tokens, S key tokens, H heads, R compose rank, G head groups

from typing import NamedTuple

from torch import Tensor

from ..impl.reference import added_terms, inner_values
from ..weights import ComposeWeights, SideWeights

ITSELF = "itself"


class Breakdown(NamedTuple):
    """Terms of the composed scores or weights of one pair.

    Attributes:
        before: Values of all heads before the composition [H].
        terms: Summands of `after`, each [H]: "itself", and, if present, "base", "query projection" (o_qp in the paper),
            "query gate" (o_qg), "key projection" (o_kp) and "key gate" (o_kg).
        inner: Values between the down and up projections, [G, R], by "query" and "key".
        weights: Compose weights of the two tokens.
        after: Sum of the terms [H]; for scores, before a floating mask is added.
    """

    before: Tensor
    terms: dict[str, Tensor]
    inner: dict[str, Tensor]
    weights: ComposeWeights
    after: Tensor


def break_down(a: Tensor, weights: ComposeWeights, num_groups: int, *, batch: int, query: int, key: int) -> Breakdown:
    """Break the composition of a pair into its terms.

    Args:
        a: Scores or weights before the composition [B, H, T, S].
        weights: The composition.
        num_groups: Head groups G.
        batch: Index of the sequence.
        query: Position of the query; -1 is the last.
        key: Position of the key.

    Raises:
        ValueError: If a position or the sequence index is out of range.
    """
    for name, position, size in (("batch", batch, a.shape[0]), ("query", query, a.shape[2]), ("key", key, a.shape[3])):
        if not -size <= position < size:
            raise ValueError(f"{name}={position}; expected {-size} to {size - 1}.")
    b, t, s = batch % a.shape[0], query % a.shape[2], key % a.shape[3]
    pair = a[b : b + 1, :, t : t + 1, s : s + 1]
    of_pair = weights._replace(
        query=weights.query.map(lambda w: w[b : b + 1, t : t + 1]),
        key=weights.key.map(lambda w: w[b : b + 1, s : s + 1]),
    )
    terms = {ITSELF: pair, **dict(added_terms(pair, of_pair, num_groups))}
    sides: dict[str, tuple[str, SideWeights]] = {"query": ("t", of_pair.query), "key": ("s", of_pair.key)}
    inner = {
        name: inner_values(pair, side, token, num_groups)[0, :, :, 0, 0]
        for name, (token, side) in sides.items()
        if side.down is not None
    }
    terms = {name: term.flatten() for name, term in terms.items()}
    return Breakdown(terms[ITSELF], terms, inner, of_pair, sum(terms.values()))

"""The terms of the composition of one query-key pair (paper, equation 7 and figure 7)."""

# B batch, T query tokens, S key tokens, H heads, R compose rank, G head groups

from typing import NamedTuple

from torch import Tensor

from ..impl.reference import added_terms, inner_values
from ..weights import ComposeWeights, SideWeights

ITSELF = "itself"


class Breakdown(NamedTuple):
    """How the scores or weights of one pair are composed.

    Attributes:
        before: Of all heads, before the composition [H].
        terms: What makes `after`, each [H]: "itself", and what there is of "base", "query projection" (the paper's
            o_qp), "query gate" (o_qg), "key projection" (o_kp) and "key gate" (o_kg).
        inner: The low-rank values between the two matrices of a projection, [G, R], by "query" and "key".
        weights: What the two tokens bring, all other tokens left out.
        after: The sum of the terms [H]; of scores, before a floating mask is added.
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
        batch: Which sequence.
        query: Position of the token that looks; -1 is the last.
        key: Position of the token that it looks at.

    Raises:
        ValueError: If a position or the sequence is not there.
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

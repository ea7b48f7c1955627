"""Masking for masked language modeling (Devlin et al., 2019)."""

# T tokens

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from dctrain.errors import UserError

from ..loss import IGNORED

HIDDEN, REPLACED = 0.8, 0.1  # fractions of spans replaced by the mask token, and by random tokens
LONGEST_SPAN, LONGEST_MEAN = 10, 5


class Masked(NamedTuple):
    """A masked sequence and its targets; -100 is ignored. Both int64 [T]."""

    input_ids: np.ndarray
    targets: np.ndarray


class Masking(NamedTuple):
    """Masks a fraction of each sequence's tokens, individually or in spans.

    80 % of the spans are replaced by the mask token, 10 % by random tokens, and 10 % are unchanged. Span lengths are
    geometric up to ten (Joshi et al., 2020). Spans do not cross the end of a document, which is never masked.

    Attributes:
        fraction: Mean fraction of masked tokens.
        span: Mean length of the spans; 1 masks single tokens.
        vocab_size: Vocabulary size of the tokenizer; the next id is the mask token.
        kept_ids: Tokens that are never masked: those that begin or end a document.
    """

    fraction: float
    span: float
    vocab_size: int
    kept_ids: tuple[int, ...]

    @property
    def mask_id(self) -> int:
        """Id of the mask token."""
        return self.vocab_size

    def __call__(self, ids: np.ndarray, key: Sequence[int]) -> Masked:
        """Mask a sequence [T]; the key seeds the random choices."""
        random = np.random.default_rng(key)
        ids = ids.astype(np.int64)
        open_places = np.flatnonzero(~np.isin(ids, self.kept_ids))
        count = int(self.fraction * len(open_places) + random.random())
        lengths = self._lengths(random, count)
        spans = _spread(random, lengths, len(open_places))
        places, spans = open_places[spans >= 0], spans[spans >= 0]
        begins = (np.diff(spans, prepend=-1) != 0) | (np.diff(places, prepend=-2) > 1)  # also after kept tokens
        fates = random.random(len(places))[np.cumsum(begins) - 1]
        is_hidden, is_replaced = fates < HIDDEN, fates >= 1 - REPLACED
        input_ids, targets = ids.copy(), np.full_like(ids, IGNORED)
        targets[places] = ids[places]
        input_ids[places[is_hidden]] = self.mask_id
        input_ids[places[is_replaced]] = random.integers(self.vocab_size, size=int(is_replaced.sum()))
        return Masked(input_ids, targets)

    def _lengths(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Sample span lengths that sum to `count`."""
        drawn = 1 + random.choice(LONGEST_SPAN, size=count, p=_length_shares(self.span))
        ends = np.minimum(np.cumsum(drawn), count)
        lengths = np.diff(ends, prepend=0)
        return lengths[lengths > 0]


@cache
def _length_shares(mean: float) -> np.ndarray:
    """Probabilities of span lengths: a truncated geometric distribution with a given mean, found by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        ratio = (low + high) / 2
        shares = ratio ** np.arange(LONGEST_SPAN)
        shares /= shares.sum()
        low, high = (ratio, high) if shares @ np.arange(1, LONGEST_SPAN + 1) < mean else (low, ratio)
    return shares


def check_masking(mask_fraction: float, mask_span: float) -> None:
    """Check the arguments of `Masking`.

    Raises:
        UserError: If an argument is out of range.
    """
    if not 0 < mask_fraction < 1:
        raise UserError(f"{mask_fraction=} must be in (0, 1).")
    if not 1 <= mask_span <= LONGEST_MEAN:
        raise UserError(f"{mask_span=} must be in [1, {LONGEST_MEAN}].")


def _spread(random: np.random.Generator, lengths: np.ndarray, total: int) -> np.ndarray:
    """Place spans uniformly at random in `total` positions: the span's index at each position, -1 outside of spans."""
    gaps = total - int(lengths.sum())
    sizes = np.concatenate([lengths, np.ones(gaps, dtype=np.int64)])
    numbers = np.concatenate([np.arange(len(lengths)), np.full(gaps, -1)])
    order = random.permutation(len(sizes))
    return np.repeat(numbers[order], sizes[order])

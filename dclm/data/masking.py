"""Masked language modelling (Devlin et al., 2019): which tokens a sequence is to be asked for, and what hides them."""

# T tokens

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from dctrain.errors import UserError

from ..loss import IGNORED

HIDDEN, REPLACED = 0.8, 0.1  # shares of the spans that become the mask token, and that become random tokens
LONGEST_SPAN, LONGEST_MEAN = 10, 5


class Masked(NamedTuple):
    """A sequence as the model sees it, and what it ought to find there; -100 does not count. Both int64 [T]."""

    input_ids: np.ndarray
    targets: np.ndarray


class Masking(NamedTuple):
    """Asks for a share of each sequence's tokens, alone or in whole spans.

    Of the spans 80 % become the mask token, 10 % random tokens, and 10 % stay. Their lengths are geometric up to ten
    (Joshi et al., 2020). None goes beyond the end of a document, which is never asked for.

    Attributes:
        fraction: Of the tokens, on average.
        span: Mean length of the spans; 1 asks for tokens one by one.
        vocab_size: Of the tokenizer; the first number beyond it is the mask token.
        kept_ids: Tokens that are never asked for: what ends a document, or begins it.
    """

    fraction: float
    span: float
    vocab_size: int
    kept_ids: tuple[int, ...]

    @property
    def mask_id(self) -> int:
        """The token that hides others."""
        return self.vocab_size

    def __call__(self, ids: np.ndarray, key: Sequence[int]) -> Masked:
        """Mask a sequence [T]; the key, some numbers, chooses how."""
        random = np.random.default_rng(key)
        ids = ids.astype(np.int64)
        open_places = np.flatnonzero(~np.isin(ids, self.kept_ids))
        count = int(self.fraction * len(open_places) + random.random())
        lengths = self._lengths(random, count)
        spans = _spread(random, lengths, len(open_places))
        places, spans = open_places[spans >= 0], spans[spans >= 0]
        begins = (np.diff(spans, prepend=-1) != 0) | (np.diff(places, prepend=-2) > 1)  # also behind what is kept
        fates = random.random(len(places))[np.cumsum(begins) - 1]
        is_hidden, is_replaced = fates < HIDDEN, fates >= 1 - REPLACED
        input_ids, targets = ids.copy(), np.full_like(ids, IGNORED)
        targets[places] = ids[places]
        input_ids[places[is_hidden]] = self.mask_id
        input_ids[places[is_replaced]] = random.integers(self.vocab_size, size=int(is_replaced.sum()))
        return Masked(input_ids, targets)

    def _lengths(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Draw lengths of spans that sum to `count`."""
        drawn = 1 + random.choice(LONGEST_SPAN, size=count, p=_length_shares(self.span))
        ends = np.minimum(np.cumsum(drawn), count)
        lengths = np.diff(ends, prepend=0)
        return lengths[lengths > 0]


@cache
def _length_shares(mean: float) -> np.ndarray:
    """Tell how often each length comes: geometric, cut at the longest, of a given mean, which bisection finds."""
    low, high = 0.0, 1.0
    for _ in range(60):
        ratio = (low + high) / 2
        shares = ratio ** np.arange(LONGEST_SPAN)
        shares /= shares.sum()
        low, high = (ratio, high) if shares @ np.arange(1, LONGEST_SPAN + 1) < mean else (low, ratio)
    return shares


def check_masking(mask_fraction: float, mask_span: float) -> None:
    """Refuse a fraction and a span that `Masking` does not take.

    Raises:
        UserError: If one is out of range.
    """
    if not 0 < mask_fraction < 1:
        raise UserError(f"{mask_fraction=} must be in (0, 1).")
    if not 1 <= mask_span <= LONGEST_MEAN:
        raise UserError(f"{mask_span=} must be in [1, {LONGEST_MEAN}].")


def _spread(random: np.random.Generator, lengths: np.ndarray, total: int) -> np.ndarray:
    """Put spans in a row of `total` places, each way as likely as any: the span's number at each, -1 where none is."""
    gaps = total - int(lengths.sum())
    sizes = np.concatenate([lengths, np.ones(gaps, dtype=np.int64)])
    numbers = np.concatenate([np.arange(len(lengths)), np.full(gaps, -1)])
    order = random.permutation(len(sizes))
    return np.repeat(numbers[order], sizes[order])

"""Means over seeds, and differences between models of the same seeds, with what they are worth."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy import stats

CONFIDENCE = 0.95
POWER = 0.8  # with which a difference of the size that is called detectable would have been found


class Difference(NamedTuple):
    """Of two models over the seeds that both have: pairs share the seed, and so the order of the data.

    Attributes:
        mean: Of the differences.
        low: Lower end of its interval of 95 % (Student's t over pairs); None for a single pair.
        high: The upper end.
        detectable: The smallest difference that so many pairs, spread as they are, would have shown with a power of
            about 80 %; None for a single pair.
        pairs: How many.
    """

    mean: float
    low: float | None
    high: float | None
    detectable: float | None
    pairs: int


def paired_difference(of: Mapping[int, float], to: Mapping[int, float]) -> Difference | None:
    """Compare numbers by seed; None where no seed is in both."""
    differences = [value - to[seed] for seed, value in of.items() if seed in to]
    if not differences:
        return None
    mean, count = statistics.mean(differences), len(differences)
    if count == 1:
        return Difference(mean, None, None, None, 1)
    error, freedom = statistics.stdev(differences) / count**0.5, count - 1
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, freedom)
    detectable = (reach + stats.t.ppf(POWER, freedom)) * error
    return Difference(mean, mean - reach * error, mean + reach * error, detectable, count)


def spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation, None of a single value."""
    return statistics.stdev(values) if len(values) > 1 else None

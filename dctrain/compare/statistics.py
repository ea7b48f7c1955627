"""Means over seeds, and differences between models of the same seeds, with what they are worth."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from ..evaluation.items import Items

CONFIDENCE = 0.95
POWER = 0.8  # with which a difference of the size that is called detectable would have been found


class Difference(NamedTuple):
    """Of two models over the seeds that both have: pairs share the seed, and so the order of the data.

    Attributes:
        mean: Of the differences.
        low: Lower end of its interval of 95 %; None for a single pair, and where nothing tells how far it may be off.
        high: The upper end.
        detectable: The smallest difference that such an interval would have excluded from 0 with a power of about 80 %;
            None where there is no interval.
        pairs: How many.
        items: Of the evaluation, whose own noise the interval counts; None if it counts the spread over pairs alone.
    """

    mean: float
    low: float | None
    high: float | None
    detectable: float | None
    pairs: int
    items: int | None = None


class ItemNoise(NamedTuple):
    """How far a mean difference may be off because the evaluation has so many items and not others.

    Attributes:
        error: Standard error over items.
        count: Of items.
        least: The least half width of an interval: where no item differs, one of 3 / count may still (95 %).
    """

    error: float
    count: int
    least: float


def item_noise(pairs: Sequence[tuple[Items, Items]], is_fraction: bool) -> ItemNoise | None:
    """Estimate the noise of an evaluation from a metric of each item, of two models, paired by seed.

    The differences of an item are averaged over seeds; their spread over items gives the error.

    Args:
        pairs: Of each seed, what both models came to.
        is_fraction: Whether an item is either right or wrong.

    Returns:
        The noise; None where seeds or models have other items.
    """
    names = list(pairs[0][0].values) if pairs else []
    if len(names) < 2 or any(items.values.keys() != set(names) for pair in pairs for items in pair):
        return None
    ours, theirs = (np.array([[pair[i].values[name] for name in names] for pair in pairs]) for i in (0, 1))
    weights = np.array([pairs[0][0].weights[name] for name in names])
    difference, share = (ours - theirs).mean(0), weights / weights.sum()
    deviations = share * (difference - (share * difference).sum())
    error = float(np.sqrt((deviations**2).sum() * len(names) / (len(names) - 1)))
    return ItemNoise(error, len(names), 3.0 / len(names) if is_fraction else 0.0)


def paired_difference(
    of: Mapping[int, float], to: Mapping[int, float], noise: ItemNoise | None = None
) -> Difference | None:
    """Compare numbers by seed; None where no seed is in both.

    The interval counts the spread over seeds (Student's t) and, where it is known, the noise of the evaluation: the
    squares of both errors are added, with the degrees of freedom of Welch and Satterthwaite.
    """
    differences = [value - to[seed] for seed, value in of.items() if seed in to]
    if not differences:
        return None
    mean, count = statistics.mean(differences), len(differences)
    if count == 1:
        return Difference(mean, None, None, None, 1)
    squares = [(statistics.variance(differences) / count, count - 1)]
    squares += [] if noise is None else [(noise.error**2, noise.count - 1)]
    total = sum(square for square, _ in squares)
    least = 0.0 if noise is None else noise.least
    if total == 0 and least == 0:  # all pairs differ by the same, which is no reason to be certain
        return Difference(mean, None, None, None, count)
    freedom = total**2 / sum(square**2 / free for square, free in squares) if total else count - 1
    quantile, error = stats.t.ppf((1 + CONFIDENCE) / 2, freedom), total**0.5
    reach = max(quantile * error, least)
    detectable = reach + stats.t.ppf(POWER, freedom) * error
    return Difference(mean, mean - reach, mean + reach, detectable, count, noise.count if noise else None)


def spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation, None of a single value."""
    return statistics.stdev(values) if len(values) > 1 else None

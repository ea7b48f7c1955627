"""Means over seeds, and paired differences between models with confidence intervals."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from ..evaluation.items import Items

CONFIDENCE = 0.95
POWER = 0.8  # statistical power of the detectable difference


class Difference(NamedTuple):
    """Difference of two models over their common seeds; pairs share the seed, and therefore the order of the data.

    Attributes:
        mean: Mean difference.
        low: Lower end of the 95 % interval; None if it cannot be estimated, as for a single pair.
        high: Upper end of the interval.
        detectable: The smallest difference that would have been significant with a power of about 80 %; None without an
            interval.
        pairs: Number of pairs.
        items: Number of evaluation items whose noise the interval includes; None if it includes only seeds.
    """

    mean: float
    low: float | None
    high: float | None
    detectable: float | None
    pairs: int
    items: int | None = None


class ItemNoise(NamedTuple):
    """Uncertainty of a mean difference due to the finite set of evaluation items.

    Attributes:
        error: Standard error over items.
        count: Number of items.
        least: Minimum half width of an interval: if no item differs, a rate of 3 / count is still possible (95 %).
    """

    error: float
    count: int
    least: float


def item_noise(pairs: Sequence[tuple[Items, Items]], is_fraction: bool) -> ItemNoise | None:
    """Estimate the noise of an evaluation from per-item metrics of two models, paired by seed.

    The differences of an item are averaged over seeds; their standard error over items is the noise.

    Args:
        pairs: Items of both models for each seed.
        is_fraction: Whether items are either right or wrong.

    Returns:
        The noise; None if seeds or models have different items.
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
    """Compare numbers by seed; None without a common seed.

    The interval includes the variation over seeds (Student's t) and, if known, the evaluation noise: the squared errors
    are added, with the Welch-Satterthwaite degrees of freedom.
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
    if total == 0 and least == 0:  # all differences are equal, which does not imply certainty
        return Difference(mean, None, None, None, count)
    freedom = total**2 / sum(square**2 / free for square, free in squares) if total else count - 1
    quantile, error = stats.t.ppf((1 + CONFIDENCE) / 2, freedom), total**0.5
    reach = max(quantile * error, least)
    detectable = reach + stats.t.ppf(POWER, freedom) * error
    return Difference(mean, mean - reach, mean + reach, detectable, count, noise.count if noise else None)


def spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation; None for a single value."""
    return statistics.stdev(values) if len(values) > 1 else None

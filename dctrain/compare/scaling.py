"""Scaling laws: a power law of loss over compute for each model family, and equivalent compute (figure 3).

The law is L = a C^-b, a line in logarithms, fitted by least squares to means over seeds. C is the training compute:
three forward passes per unit, including composition. A model of another family with loss L and compute C has an
equivalent compute of (L / a)^(-1/b) / C: the compute that the baseline would need for that loss over the model's
compute.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, MaxNLocator, ScalarFormatter

from ..errors import UserError
from ..utils.markdown import markdown_table

DRAWS = 2000  # bootstrap samples
MIN_POINTS = 2  # minimum sizes per law


class ScalingPoint(NamedTuple):
    """A model: its training compute in FLOPs, and its loss by seed."""

    model: str
    compute: float
    losses: Mapping[int, float]


class PowerLaw(NamedTuple):
    """L = scale C^-exponent."""

    scale: float
    exponent: float

    def compute(self, loss: np.ndarray | float) -> np.ndarray | float:
        """Return the compute that the law needs for a loss."""
        return (loss / self.scale) ** (-1 / self.exponent)


class IntervalEstimate(NamedTuple):
    """A number with its 95 % interval over seeds; None with a single seed."""

    value: float
    low: float | None
    high: float | None


class Scaling(NamedTuple):
    """Fitted scaling laws.

    Attributes:
        laws: Laws of the families with enough sizes.
        exponents: Exponents of the laws, with intervals.
        worth: Equivalent compute of each model of the other families, relative to the baseline's law.
    """

    laws: dict[str, PowerLaw]
    exponents: dict[str, IntervalEstimate]
    worth: dict[str, IntervalEstimate]


def fit_law(compute: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    """Fit a law to points.

    Raises:
        UserError: If there are fewer than two sizes, or the loss does not decrease with compute.
    """
    if len(set(compute)) < MIN_POINTS:
        raise UserError(f"a scaling law requires at least {MIN_POINTS} sizes; got {len(set(compute))}.")
    if not np.isfinite(losses).all() or min(losses) <= 0:
        raise UserError(f"a scaling law requires positive losses; got {list(losses)}.")
    law = _line(compute, losses)
    if law.exponent <= 0:
        raise UserError("the losses do not decrease with compute, so no law can be fitted.")
    return law


def _line(compute: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    slope, intercept = np.polyfit(np.log(compute), np.log(losses), 1)
    return PowerLaw(float(np.exp(intercept)), float(-slope))


def fit_scaling(families: Mapping[str, Sequence[ScalingPoint]], draws: int = DRAWS, seed: int = 0) -> Scaling:
    """Fit a law to each family, and compute the equivalent compute of the others relative to the first.

    Intervals are percentiles of a bootstrap over seeds, drawn jointly for all models, because seeds share the data.

    Args:
        families: Models by family; the first family is the baseline.
        draws: Bootstrap samples.
        seed: Seed of the bootstrap.

    Raises:
        UserError: If a family cannot be fitted.
    """
    points = [point for family in families.values() for point in family]
    seeds = sorted(set.intersection(*(set(point.losses) for point in points))) if points else []
    if not seeds:
        raise UserError("no seed has finished for all models of the families.")
    generator = np.random.default_rng(seed)
    samples = generator.choice(seeds, (draws, len(seeds))) if len(seeds) > 1 else []
    laws, worth = _once(families, seeds, fit_law)
    drawn = [_once(families, sample, _line) for sample in samples]  # also for samples whose losses do not decrease

    def estimate(value: float, values: list[float]) -> IntervalEstimate:
        return IntervalEstimate(value, *(np.percentile(values, (2.5, 97.5)) if values else (None, None)))

    return Scaling(
        laws,
        {name: estimate(law.exponent, [found[0][name].exponent for found in drawn]) for name, law in laws.items()},
        {name: estimate(value, [found[1][name] for found in drawn]) for name, value in worth.items()},
    )


def _once(
    families: Mapping[str, Sequence[ScalingPoint]], seeds: Sequence[int], fit: Callable[..., PowerLaw]
) -> tuple[dict[str, PowerLaw], dict[str, float]]:
    """Fit the means over a sample of seeds, which may repeat."""
    means = {
        name: [(point.model, point.compute, float(np.mean([point.losses[seed] for seed in seeds]))) for point in family]
        for name, family in families.items()
    }
    baseline = next(iter(families))
    laws = {
        name: fit([compute for _, compute, _ in rows], [loss for *_, loss in rows])
        for name, rows in means.items()
        if name == baseline or len(rows) >= MIN_POINTS
    }
    worth = {
        model: laws[baseline].compute(loss) / compute
        for name, rows in means.items()
        if name != baseline
        for model, compute, loss in rows
    }
    return laws, worth


def scaling_table(families: Mapping[str, Sequence[ScalingPoint]], scaling: Scaling) -> str:
    """Format the results as Markdown."""
    baseline = next(iter(families))
    rows = [
        [point.model, name, f"{point.compute:.3e}", f"{np.mean(list(point.losses.values())):.4f}", _said(worth)]
        for name, family in families.items()
        for point in family
        for worth in [scaling.worth.get(point.model)]
    ]
    lines = [markdown_table(["model", "family", "FLOPs", "loss", f"compute of {baseline} [95 %]"], rows), ""]
    for name, law in scaling.laws.items():
        lines.append(
            f"{name}: loss = {law.scale:.4g} C^-{law.exponent:.4g}; exponent {_said(scaling.exponents[name], 4)}"
        )
    return "\n".join(lines)


def _said(estimate: IntervalEstimate | None, digits: int = 2) -> str:
    if estimate is None:
        return "-"
    interval = "" if estimate.low is None else f" [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"
    return f"{estimate.value:.{digits}f}{interval}"


def plot_scaling(families: Mapping[str, Sequence[ScalingPoint]], scaling: Scaling, path: Path) -> None:
    """Plot losses and laws over compute, with logarithmic axes."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    reach = [point.compute for family in families.values() for point in family]
    line = np.geomspace(min(reach) / 1.3, max(reach) * 1.3)
    for number, (name, family) in enumerate(families.items()):
        color = f"C{number}"
        for point in family:
            axes.plot([point.compute] * len(point.losses), list(point.losses.values()), ".", color=color, alpha=0.4)
        means = [np.mean(list(point.losses.values())) for point in family]
        axes.plot([point.compute for point in family], means, "o", color=color, label=name)
        if name in scaling.laws:
            law = scaling.laws[name]
            axes.plot(line, law.scale * line**-law.exponent, "--", color=color, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="training compute (FLOPs)", ylabel="validation loss")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(np.inf, np.inf)))
    axes.yaxis.set_major_locator(MaxNLocator(8))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)

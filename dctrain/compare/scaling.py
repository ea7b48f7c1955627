"""Loss against compute: a power law for each family of models, and how much compute the others are worth (figure 3).

The law is L = a C^-b, a straight line in logarithms, fitted by least squares to the means over seeds. Compute C is that
of training: three forward passes of every unit, each model's own composition included. A model of another family that
reaches a loss L with compute C is worth (L / a)^(-1/b) / C of the baseline's: the compute that the baseline would need
for that loss over the compute that it took.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, MaxNLocator, ScalarFormatter

from ..errors import UserError
from ..utils.markdown import markdown_table

DRAWS = 2000  # of the bootstrap
MIN_POINTS = 2  # sizes of a law


class ScalingPoint(NamedTuple):
    """A model: the compute of its training in FLOPs, and its loss by seed."""

    model: str
    compute: float
    losses: Mapping[int, float]


class PowerLaw(NamedTuple):
    """L = scale C^-exponent."""

    scale: float
    exponent: float

    def compute(self, loss: np.ndarray | float) -> np.ndarray | float:
        """Return the compute that takes a model of the law to a loss."""
        return (loss / self.scale) ** (-1 / self.exponent)


class IntervalEstimate(NamedTuple):
    """A number, and the interval of 95 % in which seeds leave it; None where there is one seed alone."""

    value: float
    low: float | None
    high: float | None


class Scaling(NamedTuple):
    """What came out.

    Attributes:
        laws: Of each family that has enough sizes.
        exponents: Of the laws, with intervals.
        worth: For each model of another family how much compute of the baseline's it is worth.
    """

    laws: dict[str, PowerLaw]
    exponents: dict[str, IntervalEstimate]
    worth: dict[str, IntervalEstimate]


def fit_law(compute: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    """Fit a law to points.

    Raises:
        UserError: If there are fewer than two sizes, or the loss does not fall with compute.
    """
    if len(set(compute)) < MIN_POINTS:
        raise UserError(f"a scaling law takes at least {MIN_POINTS} sizes; got {len(set(compute))}.")
    if not np.isfinite(losses).all() or min(losses) <= 0:
        raise UserError(f"a scaling law takes losses above 0; got {list(losses)}.")
    law = _line(compute, losses)
    if law.exponent <= 0:
        raise UserError("the losses do not fall with compute: there is no law to fit.")
    return law


def _line(compute: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    slope, intercept = np.polyfit(np.log(compute), np.log(losses), 1)
    return PowerLaw(float(np.exp(intercept)), float(-slope))


def fit_scaling(families: Mapping[str, Sequence[ScalingPoint]], draws: int = DRAWS, seed: int = 0) -> Scaling:
    """Fit a law to each family, and measure the others in compute of the first.

    Intervals are percentiles of a bootstrap over seeds, drawn for all models together, as seeds share the data.

    Args:
        families: The models of each family; the first is the baseline.
        draws: Of the bootstrap.
        seed: Of its random numbers.

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
    drawn = [_once(families, sample, _line) for sample in samples]  # also of seeds whose losses do not fall

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
    """Fit the means over seeds, of which some may stand more than once."""
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
    """Write what came out as Markdown."""
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
    """Draw losses and laws over compute, both axes logarithmic."""
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

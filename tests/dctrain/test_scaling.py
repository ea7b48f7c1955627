"""Scaling laws: known exponents are recovered, and the paper's losses give the compute ratios that it quotes."""

import math

import numpy as np
import pytest

from dctrain.compare.scaling import ScalingPoint, fit_law, fit_scaling, plot_scaling, scaling_table
from dctrain.errors import UserError

COMPUTE = [1e15, 4e15, 3e16]


def family(
    prefix: str, scale: float, exponent: float, noise: float = 0.0, seeds: int = 1, start: int = 0
) -> list[ScalingPoint]:
    generator = np.random.default_rng(start)
    return [
        ScalingPoint(
            f"{prefix}{n}", c, {s: scale * c**-exponent * math.exp(noise * generator.normal()) for s in range(seeds)}
        )
        for n, c in enumerate(COMPUTE)
    ]


def test_fit_recovers_known_law():
    law = fit_law(COMPUTE, [20 * c**-0.05 for c in COMPUTE])
    assert law.exponent == pytest.approx(0.05) and law.scale == pytest.approx(20)
    assert law.compute(20 * 7e15**-0.05) == pytest.approx(7e15)


def test_equivalent_compute_matches_known_ratio():
    """A family that reaches the losses of 1.8 times the compute has a ratio of 1.8 at every size."""
    scale = 20 * 1.8**-0.05
    families = {"plain": family("p", 20, 0.05), "composed": family("c", scale, 0.05)}
    scaling = fit_scaling(families)
    assert list(scaling.worth) == ["c0", "c1", "c2"]
    for worth in scaling.worth.values():
        assert worth.value == pytest.approx(1.8) and worth.low is None
    assert scaling.exponents["composed"].value == pytest.approx(0.05)
    assert "| c1    | composed" in scaling_table(families, scaling)


def test_interval_coverage_matches_confidence_level():
    covered = 0
    for start in range(60):
        families = {
            "plain": family("p", 20, 0.05, 0.01, 8, start),
            "composed": family("c", 19, 0.05, 0.01, 8, 1000 + start),
        }
        exponent = fit_scaling(families, draws=200).exponents["plain"]
        covered += exponent.low <= 0.05 <= exponent.high
    assert 45 <= covered <= 60  # a bootstrap over eight seeds covers slightly less than 95 %


def test_equivalent_compute_matches_paper_table_4():
    """With 300 billion tokens per model, DCPythia matches Pythia with about twice the compute, as in the paper."""
    tokens = 300e9
    pythia = {"2.8B": (2.775e9, 6.63), "6.9B": (6.857e9, 6.29), "12B": (11.846e9, 6.01)}
    composed = {"DC 2.8B": (2.8e9, 6.36), "DC 6.9B": (6.9e9, 5.95)}
    families = {
        name: [ScalingPoint(model, 6 * n * tokens, {0: math.log(ppl)}) for model, (n, ppl) in models.items()]
        for name, models in (("Pythia", pythia), ("DCPythia", composed))
    }
    worth = fit_scaling(families).worth
    logs = [(math.log(p.compute), math.log(p.losses[0])) for p in families["Pythia"]]  # slope by hand
    mean_x, mean_y = (sum(column) / 3 for column in zip(*logs, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)
    for point in families["DCPythia"]:
        needed = mean_x + (math.log(point.losses[0]) - mean_y) / slope
        assert worth[point.model].value == pytest.approx(math.exp(needed) / point.compute, rel=1e-9)
        assert 1.7 < worth[point.model].value < 2.3


def test_failed_fit_raises_error_with_reason():
    for compute, losses, said in (
        ([1e9, 1e9], [2.0, 1.0], "at least 2 sizes; got 1"),
        ([1e9, 2e9], [1.0, 2.0], "do not decrease"),
    ):
        with pytest.raises(UserError, match=said):
            fit_law(compute, losses)
    apart = {"a": [ScalingPoint("x", 1e9, {0: 1.0})], "b": [ScalingPoint("y", 1e9, {1: 1.0})]}
    with pytest.raises(UserError, match="no seed has finished for all models"):
        fit_scaling(apart)
    with pytest.raises(UserError, match="no seed"):
        fit_scaling({"a": []})


def test_scaling_plot_is_written(tmp_path):
    families = {"plain": family("p", 20, 0.05, 0.01, 3), "composed": family("c", 19, 0.05, 0.01, 3)}
    plot_scaling(families, fit_scaling(families, draws=50), tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 10000

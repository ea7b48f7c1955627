"""Figures of task suites: accuracy and perplexity by shots (figure 6), accuracy by pattern and transformation."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dctrain.evaluation.results import EvaluationResults

METRICS = {"exact_match": "accuracy (%)", "perplexity": "perplexity"}
SHOTS = re.compile(r"(.+): (\d+) shots")
CELL = re.compile(r"(.+): (\S+) x (\S+)")

Numbers = dict[tuple[str, str], float]  # by name and metric


def draw_suites(models: Sequence[EvaluationResults], folder: Path) -> None:
    """Plot every measured suite: `SUITE-shots.png`, and `SUITE-tasks.png` if task names have pattern and
    transformation.
    """
    columns = {model.model: {(m.name, m.metric): m.value for m in model.measures} for model in models}
    names = {name for numbers in columns.values() for name, _ in numbers}
    for suite in sorted({match[1] for match in map(SHOTS.fullmatch, names) if match}):
        stem = folder / suite.removesuffix(".jsonl").replace("/", "_")
        asked = {model: numbers for model, numbers in columns.items() if (suite, "exact_match") in numbers}
        _draw_shots(suite, asked, stem.with_name(f"{stem.name}-shots.png"))
        if any(CELL.fullmatch(name) and name.startswith(f"{suite}: ") for name in names):
            _draw_tasks(suite, asked, stem.with_name(f"{stem.name}-tasks.png"))


def _draw_shots(suite: str, models: dict[str, Numbers], path: Path) -> None:
    figure = Figure(figsize=(9, 4), layout="constrained")
    for plane, (metric, label) in zip(figure.subplots(1, 2), METRICS.items(), strict=True):
        for model, numbers in models.items():
            matches = [(SHOTS.fullmatch(name), value) for (name, of), value in numbers.items() if of == metric]
            points = sorted((int(match[2]), value) for match, value in matches if match and match[1] == suite)
            factor = 100 if metric == "exact_match" else 1
            plane.plot([shots for shots, _ in points], [factor * value for _, value in points], marker="o", label=model)
        plane.set(xlabel="shots", ylabel=label)
        plane.grid(alpha=0.3)
    plane.legend()
    figure.savefig(path, dpi=120)


def _draw_tasks(suite: str, models: dict[str, Numbers], path: Path) -> None:
    """Plot a heat map per model: accuracy of the first, differences of the others."""
    cells = {
        model: {match.groups()[1:]: 100 * value for match, value in _cells(suite, numbers)}
        for model, numbers in models.items()
    }
    patterns = list(dict.fromkeys(pattern for found in cells.values() for pattern, _ in found))
    transformations = list(dict.fromkeys(what for found in cells.values() for _, what in found))
    figure = Figure(figsize=(1.2 + 4.8 * len(models), 1.4 + 0.5 * len(patterns)), layout="constrained")
    first = None
    for plane, (model, found) in zip(figure.subplots(1, len(models), squeeze=False)[0], cells.items(), strict=True):
        values = np.array([[found.get((pattern, what), np.nan) for what in transformations] for pattern in patterns])
        _draw_map(plane, values if first is None else values - first, is_difference=first is not None)
        plane.set_xticks(range(len(transformations)), transformations, rotation=35, ha="right")
        plane.set_yticks(range(len(patterns)), patterns if first is None else [])
        plane.set_title(f"{model}: {'accuracy (%)' if first is None else 'difference'}", fontsize=9)
        first = values if first is None else first
    figure.savefig(path, dpi=120)


def _cells(suite: str, numbers: Numbers) -> list[tuple[re.Match, float]]:
    matches = [(CELL.fullmatch(name), value) for (name, of), value in numbers.items() if of == "exact_match"]
    return [(match, value) for match, value in matches if match and match[1] == suite]


def _draw_map(plane: Axes, values: np.ndarray, is_difference: bool) -> None:
    """Plot a heat map with numbers."""
    reach = max(1.0, float(np.nanmax(np.abs(values))))
    top = reach if is_difference else 100
    colors, bottom = ("RdBu", -reach) if is_difference else ("Blues", 0)
    plane.imshow(values, aspect="auto", cmap=colors, vmin=bottom, vmax=top)
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            is_dark = abs(value) > 0.6 * top
            message = f"{value:+.0f}" if is_difference else f"{value:.0f}"
            plane.text(
                column, row, message, ha="center", va="center", fontsize=8, color="white" if is_dark else "black"
            )

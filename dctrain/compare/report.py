"""Report of a comparison: table (Markdown, CSV) and curves of the metrics (CSV, PNG)."""

import csv
import statistics
from pathlib import Path
from textwrap import fill

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..errors import UserError
from ..evaluation.items import read_items
from ..utils.markdown import markdown_table
from .experiment import Experiment, Run
from .results import ComparisonResults
from .scaling import ScalingPoint, fit_scaling, plot_scaling, scaling_table
from .statistics import Difference, ItemNoise, item_noise, paired_difference, spread
from .training import run_items

PERCENT = ("top1", "top5", "accuracy", "exact_match", "to_text", "to_image")  # metrics reported in percent
MAX_POINTS = 1000  # maximum points per curve in curves.csv
LOSS = "val/loss"  # metric of scaling laws


def write_report(experiment: Experiment, results: ComparisonResults, folder: Path) -> str:
    """Write `table.md`, `table.csv`, `curves.csv`, `curves.png`, and with families `scaling.png`; return the
    Markdown."""
    rows = [summarize(experiment, results, model) for model in experiment.models if results.finished(model)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with open(folder / "table.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    text = _markdown(experiment, rows, results)
    if experiment.families:
        text += "\n\n" + _write_scaling(experiment, results, folder / "scaling.png")
    (folder / "table.md").write_text(text + "\n")
    _write_curves(experiment, results, folder / "curves.csv")
    _plot(experiment, results, folder / "curves.png")
    return text


def summarize(experiment: Experiment, results: ComparisonResults, model: str) -> dict:
    """Summarize a model's finished runs: costs and, for each metric, mean and standard deviation of the last value over
    seeds, mean of the best value, and difference to the baseline with its interval. Accuracies are in percent.
    """
    runs, baseline = results.finished(model), results.finished(experiment.baseline)
    first = next(iter(runs.values()))
    speeds = [run["units_per_second"] for run in runs.values() if run["units_per_second"] is not None]
    row = {
        "model": model,
        "seeds": len(runs),
        "parameters": first["parameters"],
        "flops": first["forward_flops"],
        "unit": first["unit"],
        "units_per_second": statistics.median(speeds) if speeds else None,
    }
    for metric, mode in experiment.metrics.items():
        finals = _finals(runs, metric)
        better = min if mode == "min" else max
        best = [better(value for _, value in run["curves"][metric]) * _factor(metric) for run in runs.values()]
        row[metric] = statistics.mean(finals.values())
        row[f"{metric} sd"] = spread(list(finals.values()))
        row[f"{metric} best"] = statistics.mean(best)
        if model != experiment.baseline:
            noise = _noise(experiment, results, model, metric)
            difference = paired_difference(finals, _finals(baseline, metric), noise)
            values = difference or Difference(*(None,) * 6)
            row |= {f"{metric} {name}": value for name, value in zip(_PARTS, values, strict=True)}
    if model in experiment.paper:
        row["paper"] = experiment.paper[model]
    return row


_PARTS = ("difference", "low", "high", "detectable", "pairs", "items")


def _noise(experiment: Experiment, results: ComparisonResults, model: str, metric: str) -> ItemNoise | None:
    """Estimate the evaluation noise, in the metric's unit, from recorded per-item results."""
    seeds = results.finished(model).keys() & results.finished(experiment.baseline).keys()
    found = [
        tuple(read_items(run_items(results.path.parent, experiment, Run(name, seed))).get(metric) for name in names)
        for names in [(model, experiment.baseline)]
        for seed in sorted(seeds)
    ]
    if not all(items for pair in found for items in pair):
        return None
    noise, factor = item_noise(found, is_fraction=_factor(metric) == 100), _factor(metric)
    return None if noise is None else ItemNoise(noise.error * factor, noise.count, noise.least * factor)


def _finals(runs: dict[int, dict], metric: str) -> dict[int, float]:
    return {seed: run["curves"][metric][-1][1] * _factor(metric) for seed, run in runs.items()}


def _factor(metric: str) -> float:
    return 100.0 if any(part in metric for part in PERCENT) else 1.0


def _markdown(experiment: Experiment, rows: list[dict], results: ComparisonResults) -> str:
    """Format the table with a description."""
    header = ["model", "seeds", "parameters", "MFLOPs", f"{rows[0]['unit']}/s"] if rows else ["model"]
    for metric in experiment.metrics:
        percent = " (%)" if _factor(metric) == 100 else ""
        header += [f"{metric}{percent}", "best", "difference [95 %]", "detectable"]
    header += ["paper"] if experiment.paper else []
    cells = [_cells(experiment, row) for row in rows]
    machines = sorted({_machine(run) for model in experiment.models for run in results.finished(model).values()})
    missing = [run.key for run in experiment.runs if results.find(run) is None]
    recipe = f"Recipe: {experiment.config} {' '.join(experiment.arguments)}"
    lines = [
        f"### {experiment.title}",
        "",
        markdown_table(header, cells),
        "",
        "Means over seeds (standard deviation) of the last validation; best: of the best one. Differences to "
        f"{experiment.baseline} are paired by seed; detectable: the smallest difference that would be significant "
        "with a power of about 80 %.",
        *_counted(experiment, rows),
        recipe.rstrip(),
        f"Hardware: {'; '.join(machines)}",
    ]
    lines += [f"Not finished: {', '.join(missing)}"] if missing else []
    return "\n".join(lines)


def _counted(experiment: Experiment, rows: list[dict]) -> list[str]:
    """Describe the sources of noise that the intervals include."""
    lines = []
    for metric in experiment.metrics:
        counts = {row.get(f"{metric} items") for row in rows if row.get(f"{metric} low") is not None}
        known = sorted(count for count in counts if count is not None)
        if known:
            lines.append(
                f"{metric}: intervals include the variation over seeds and the {known[0]:,} items of the evaluation."
            )
        if None in counts:
            lines.append(
                f"{metric}: intervals include the variation over seeds only, not the evaluation noise (too narrow)."
            )
    return lines


def _machine(run: dict) -> str:
    where = run["environment"][-1] if run["environment"] else {}
    names = (where.get("device"), f"torch {where.get('torch')}", f"commit {where.get('commit')}")
    return ", ".join(str(name) for name in names)


def _cells(experiment: Experiment, row: dict) -> list[str]:
    cells = [row["model"], str(row["seeds"]), f"{row['parameters']:,}", f"{row['flops'] / 1e6:.2f}"]
    cells.append(_number(row["units_per_second"], 0))
    for metric in experiment.metrics:
        digits = 2 if _factor(metric) == 100 else 4
        deviation = row[f"{metric} sd"]
        cells.append(_number(row[metric], digits) + ("" if deviation is None else f" ({deviation:.{digits}f})"))
        cells.append(_number(row[f"{metric} best"], digits))
        difference, low, high, detectable = (row.get(f"{metric} {part}") for part in _PARTS[:4])
        interval = "" if low is None else f" [{low:+.{digits}f}, {high:+.{digits}f}]"
        cells.append("-" if difference is None else f"{difference:+.{digits}f}{interval}")
        cells.append(_number(detectable, digits))
    return cells + ([_number(row.get("paper"), 2)] if experiment.paper else [])


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _write_scaling(experiment: Experiment, results: ComparisonResults, path: Path) -> str:
    """Fit and plot scaling laws of the families; return the text, or why it is not possible."""
    families = {
        name: [point_of(model, results.finished(model)) for model in models if results.finished(model)]
        for name, models in experiment.families.items()
    }
    try:
        scaling = fit_scaling(families)
    except UserError as error:
        return f"No scaling law: {error}"
    plot_scaling(families, scaling, path)
    return scaling_table(families, scaling)


def point_of(model: str, runs: dict[int, dict]) -> ScalingPoint:
    """Return the training compute and the losses of a model."""
    first = next(iter(runs.values()))
    units = first["units_per_step"] * (1 + first["curves"][LOSS][-1][0])
    losses = {seed: run["curves"][LOSS][-1][1] for seed, run in runs.items()}
    return ScalingPoint(model, 3.0 * first["forward_flops"] * units, losses)


def _write_curves(experiment: Experiment, results: ComparisonResults, path: Path) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "seed", "curve", "step", "value"])
        for model in experiment.models:
            for seed, run in results.finished(model).items():
                for curve, points in run["curves"].items():
                    every = -(-len(points) // MAX_POINTS)
                    kept = points[::-1][::every][::-1]  # including the last point
                    writer.writerows([model, seed, curve, step, value] for step, value in kept)


def _plot(experiment: Experiment, results: ComparisonResults, path: Path) -> None:
    """Plot each metric over the steps: mean over seeds, and range from worst to best."""
    models = [model for model in experiment.models if results.finished(model)]
    metrics = list(experiment.metrics)
    figure = Figure(figsize=(8, 3.75 * len(metrics) + 0.5 + 0.25 * len(models)), layout="constrained")
    axes = figure.subplots(len(metrics), squeeze=False)[:, 0]
    for metric, plane in zip(metrics, axes, strict=True):
        for number, model in enumerate(models):
            curves = [run["curves"][metric] for run in results.finished(model).values()]
            values = [[_factor(metric) * value for _, value in points] for points in zip(*curves, strict=False)]
            steps = [step for step, _ in curves[0]][: len(values)]
            color, seeds = f"C{number}", f" ({len(curves)} seeds)" if len(curves) > 1 else ""
            label = fill(model + seeds, 100) if plane is axes[0] else None
            plane.plot(steps, [statistics.mean(v) for v in values], color=color, marker="o", markersize=4, label=label)
            plane.fill_between(steps, list(map(min, values)), list(map(max, values)), color=color, alpha=0.2)
        plane.set(xlabel="training step", ylabel=metric + (" (%)" if _factor(metric) == 100 else ""))
        plane.xaxis.set_major_locator(MaxNLocator(integer=True))
        plane.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8)
    figure.savefig(path, dpi=120)

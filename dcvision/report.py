"""The report of a comparison: a table as CSV and Markdown, and curves as CSV and PNG."""

import csv
import statistics
from pathlib import Path
from textwrap import fill

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

COLUMNS = {  # columns of the table, and how Markdown writes their values
    "model": "{}",
    "seeds": "{}",
    "parameters": "{:,}",
    "gflops": "{:.2f}",
    "images_per_second": "{:.0f}",
    "top1": "{:.2f}",
    "top1_sd": "{:.2f}",
    "top5": "{:.2f}",
    "best_top1": "{:.2f}",
}


def write_report(runs: list[dict], folder: Path) -> str:
    """Write `table.csv`, `table.md`, `curves.csv` and `curves.png`; return the Markdown table.

    Args:
        runs: For each finished run its model, seed, curves, speed, parameters and FLOPs (`dcvision.compare`).
        folder: Where to write.
    """
    models = list(dict.fromkeys(run["model"] for run in runs))
    rows = [summarise(model, [run for run in runs if run["model"] == model]) for model in models]
    with open(folder / "table.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    table = _markdown(rows)
    (folder / "table.md").write_text(table + "\n")
    _write_curves(runs, folder / "curves.csv")
    _plot(runs, models, folder / "curves.png")
    return table


def summarise(model: str, runs: list[dict]) -> dict:
    """Summarise the seeds of a model: final accuracies in percent, their mean and standard deviation, and its costs."""
    finals = {tag: [100 * run["curves"][f"val/{tag}"][-1][1] for run in runs] for tag in ("top1", "top5")}
    best = [100 * max(value for _, value in run["curves"]["val/top1"]) for run in runs]
    speeds = [run["images_per_second"] for run in runs if run["images_per_second"] is not None]
    return {
        "model": model,
        "seeds": len(runs),
        "parameters": runs[0]["parameters"],
        "gflops": runs[0]["flops"] / 1e9,
        "images_per_second": statistics.median(speeds) if speeds else None,
        "top1": statistics.mean(finals["top1"]),
        "top1_sd": statistics.stdev(finals["top1"]) if len(runs) > 1 else None,
        "top5": statistics.mean(finals["top5"]),
        "best_top1": statistics.mean(best),
    }


def _markdown(rows: list[dict]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = ["-" if row[name] is None else form.format(row[name]) for name, form in COLUMNS.items()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _write_curves(runs: list[dict], path: Path) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "seed", "curve", "step", "value"])
        for run in runs:
            for tag, points in run["curves"].items():
                writer.writerows([run["model"], run["seed"], tag, step, value] for step, value in points)


def _plot(runs: list[dict], models: list[str], path: Path) -> None:
    """Draw validation top-1 over the steps: the mean over seeds, and the range between the worst and the best."""
    figure = Figure(figsize=(8, 4.25 + 0.25 * len(models)), layout="constrained")
    axes = figure.add_subplot()
    for number, model in enumerate(models):
        curves = [run["curves"]["val/top1"] for run in runs if run["model"] == model]
        steps = [step for step, _ in curves[0]]
        values = [[100 * value for _, value in points] for points in zip(*curves, strict=False)]
        color = f"C{number}"
        seeds = f" ({len(curves)} seeds)" if len(curves) > 1 else ""
        means = [statistics.mean(v) for v in values]
        axes.plot(steps[: len(values)], means, color=color, marker="o", markersize=4, label=fill(model + seeds, 100))
        axes.fill_between(steps[: len(values)], list(map(min, values)), list(map(max, values)), color=color, alpha=0.2)
    axes.set(xlabel="training step", ylabel="validation top-1 (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8)
    figure.savefig(path, dpi=120)

"""The table of an evaluation: a row for each number, a column for each model, with differences to the first."""

from collections.abc import Sequence
from statistics import mean

from .markdown import markdown_table
from .results import Measure, Results

PERCENT = ("acc", "acc_norm", "exact_match", "f1", "mcc", "top1", "top5")  # metrics between 0 and 1, told in percent


def evaluation_table(models: Sequence[Results]) -> str:
    """Write the table as Markdown, which is readable on a terminal: "6.360 / -0.270" is a value and its difference."""
    columns = [_numbers(results) for results in models]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = []
    for name, metric in keys:
        first = columns[0].get((name, metric))
        cells = [_cell(metric, column.get((name, metric)), first, is_first=not i) for i, column in enumerate(columns)]
        rows.append([name, f"{metric} (%)" if _is_percent(metric) else metric, *cells])
    return markdown_table(["", "metric", *(results.model for results in models)], rows)


def _numbers(results: Results) -> dict[tuple[str, str], Measure]:
    """Take a model's numbers by what they are, and the mean accuracy over tasks of as many shots."""
    numbers = {(measure.name, measure.metric): measure for measure in results.measures}
    by_shots: dict[str, list[Measure]] = {}
    for (name, metric), measure in numbers.items():
        task, _, shots = name.rpartition(", ")
        if metric == "acc" and task:
            by_shots.setdefault(shots, []).append(measure)
    for shots, measures in by_shots.items():
        if len(measures) > 1:
            name = f"mean of {len(measures)} tasks, {shots}"
            value, count = mean(measure.value for measure in measures), sum(measure.count for measure in measures)
            numbers[name, "acc"] = Measure(name, "acc", value, None, True, count, "questions")
    return numbers


def _is_percent(metric: str) -> bool:
    return metric.partition(" ")[0] in PERCENT


def _cell(metric: str, measure: Measure | None, first: Measure | None, is_first: bool) -> str:
    if measure is None:
        return "-"
    factor, digits = (100, 1) if _is_percent(metric) else (1, 3)
    said = f"{factor * measure.value:.{digits}f}"
    if is_first or first is None:
        return said
    return f"{said} / {factor * (measure.value - first.value):+.{digits}f}"

"""Table of an evaluation: one row per number, one column per model, with differences to the first model."""

from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

from ..utils.markdown import markdown_table
from .results import QUESTIONS, EvaluationResults, Measure

PERCENT = ("acc", "acc_norm", "exact_match", "top1", "top5")  # metrics in [0, 1], reported in percent
APART = ("preprocessing", "real")  # settings that depend on the model, or that have separate rows
Key = tuple[str, str]  # name and metric


class Number(NamedTuple):
    """A number and the settings it depends on."""

    measure: Measure
    settings: dict


def evaluation_table(models: Sequence[EvaluationResults]) -> str:
    """Format the table as Markdown: "6.360 / -0.270" is a value and its difference.

    Below the table there is one line per model with its provenance.

    Numbers with different settings, such as another limit, are not subtracted; a line below the table explains this.
    """
    columns = [_numbers(results) for results in models]
    for column, means in zip(columns, _means(columns), strict=True):
        column |= means
    others: set[str] = set()
    rows = []
    keys = (key for column in columns for key, number in column.items() if not number.measure.is_detail)
    for key in dict.fromkeys(keys):
        first = columns[0].get(key)
        cells = [_cell(column.get(key), first, others, is_first=not i) for i, column in enumerate(columns)]
        name, metric = key
        rows.append([name, f"{metric} (%)" if _is_percent(metric) else metric, *cells])
    table = markdown_table(["", "metric", *(results.model for results in models)], rows)
    if others:
        message = ", ".join(sorted(others))
        table += f"\n\n\\* measured with different settings than the first model ({message}); not subtracted"
    return "\n".join([table, "", *map(_provenance, models)])


def _provenance(results: EvaluationResults) -> str:
    """Describe a model and the provenance of its numbers in one line."""
    content = results.content
    identity, where = content["identity"], content["environment"]
    tokenizer = identity.get("tokenizer")
    parts = [
        f"{content['checkpoint']}, {content['parameters']:,} parameters, {identity['dtype']}",
        f"weights {identity['weights_crc32']:08x}",
        f"tokenizer {tokenizer['crc32']:08x} ({tokenizer['vocab_size']:,} tokens)" if tokenizer else None,
        f"commit {where['commit']}, torch {where['torch']}, {where['device']}",
    ]
    return f"- {results.model}: {'; '.join(part for part in parts if part)}"


def _numbers(results: EvaluationResults) -> dict[Key, Number]:
    numbers = {}
    for entry in results.content["results"].values():
        settings = {name: value for name, value in entry["settings"].items() if name not in APART}
        for measure in (Measure(**values) for values in entry["measures"]):
            numbers[measure.name, measure.metric] = Number(measure, settings)
    return numbers


def _means(columns: Sequence[dict[Key, Number]]) -> list[dict[Key, Number]]:
    """Average the accuracies of tasks with the same number of shots, if all models have the same tasks and settings."""
    by_shots: list[dict[str, dict[str, Number]]] = []
    for column in columns:
        found: dict[str, dict[str, Number]] = {}
        for (name, metric), number in column.items():
            task, _, shots = name.rpartition(", ")
            if metric == "acc" and task and number.measure.unit == QUESTIONS:
                found.setdefault(shots, {})[task] = number
        by_shots.append(found)
    means: list[dict[Key, Number]] = [{} for _ in columns]
    for shots, asked in by_shots[0].items():
        is_same = [
            {task: number.settings for task, number in found.get(shots, {}).items()}
            == {task: number.settings for task, number in asked.items()}
            for found in by_shots
        ]
        if len(asked) < 2 or not all(is_same):
            continue
        for column, found in zip(means, by_shots, strict=True):
            measures = [number.measure for number in found[shots].values()]
            name = f"mean of {len(measures)} tasks, {shots}"
            value, count = mean(measure.value for measure in measures), sum(measure.count for measure in measures)
            column[name, "acc"] = Number(Measure(name, "acc", value, None, True, count, QUESTIONS), {})
    return means


def _is_percent(metric: str) -> bool:
    return metric.partition(" ")[0] in PERCENT


def _cell(number: Number | None, first: Number | None, others: set[str], is_first: bool) -> str:
    """Format a number; settings that differ from the first model's are added to `others`."""
    if number is None:
        return "-"
    factor, digits = (100, 1) if _is_percent(number.measure.metric) else (1, 3)
    message = f"{factor * number.measure.value:.{digits}f}"
    if is_first or first is None:
        return message
    names = {**number.settings, **first.settings}
    different = {name for name in names if number.settings.get(name) != first.settings.get(name)}
    if different:
        others |= different
        return f"{message} *"
    return f"{message} / {factor * (number.measure.value - first.measure.value):+.{digits}f}"

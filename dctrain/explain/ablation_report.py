"""Report of an ablation as a table and a figure: numbers of the full model, and the effect of disabling each part."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..evaluation.results import EvaluationResults, Measure
from ..utils.markdown import markdown_table
from .ablation import KIND, KINDS, WITHOUT, without_title
from .explanation import Explanation, write_explanation
from .heatmaps import by_layer, draw_map

SPEEDS = ("images_per_second",)
TITLES = {"branches": "a branch, in all layers", "layers": "the composition of a layer", "heads": "a head"}
SHOWN = 12  # heads with the largest effect in the printed table


class AblationRow(NamedTuple):
    """A number of a model with a part disabled.

    Attributes:
        model: Name of the model.
        title: Title of the measurement.
        measured: What is measured, such as a subset.
        metric: Name of the metric; perplexities are reported as "loss", in nats per token.
        kind: Kind of the disabled part; "" for the full model.
        without: Name of the disabled part; "" for none.
        value: The number.
        worse_by: How much worse it is than the full model's.
        stderr: Standard error of that, as if all answers were independent, also between the models; None if unknown and
            for the full model.
        is_main: Whether it is of the whole measurement, not of a subset.
    """

    model: str
    title: str
    measured: str
    metric: str
    kind: str
    without: str
    value: float
    worse_by: float
    stderr: float | None
    is_main: bool


def report_ablation(models: Sequence[EvaluationResults], folder: Path) -> None:
    """Print tables of the evaluated models; write ablation.csv, and a figure per model."""
    write_explanation(explain_ablation(models), folder, (), {})  # each model's results have their provenance


def explain_ablation(models: Sequence[EvaluationResults]) -> Explanation:
    """Explain models that were evaluated in full and with parts disabled."""
    rows = [row for results in models for row in _with_parts(_rows(results))]
    names = dict.fromkeys(row.model for row in rows)
    figures = {f"{name}-ablation": _draw(name, [row for row in rows if row.model == name]) for name in names}
    reading = (
        "The model is evaluated with one part disabled at a time. The larger the number in brackets, the more"
        " the model depends on that part."
    )
    return Explanation("Without parts of the model", reading, "\n\n".join(_tables(rows)), figures, {"ablation": rows})


def _rows(results: EvaluationResults) -> list[AblationRow]:
    """Compare each ablation with the full model measured with the same settings; others are skipped."""
    entries = results.content["results"]
    rows = []
    for title, entry in entries.items():
        kind, without = (entry["settings"].get(name, "") for name in (KIND, WITHOUT))
        of = title.removesuffix(without_title(without)) if without else title
        whole = entries[of]
        if _apart_from_part(entry) != _apart_from_part(whole):
            continue
        before = {(m["name"], m["metric"]): Measure(**m) for m in whole["measures"]}
        measures = [Measure(**measure) for measure in entry["measures"] if measure["metric"] not in SPEEDS]
        for measure in measures:
            metric, value = _number(measure)
            other = before[measure.name, measure.metric]
            worse = value - _number(other)[1]
            worse_by = (-worse if measure.higher_is_better else worse) + 0.0  # no negative zero
            errors = (measure.stderr, other.stderr)
            error = math.hypot(*errors) if without and None not in errors else None
            is_main = measure.name == measures[0].name
            rows.append(
                AblationRow(results.model, of, measure.name, metric, kind, without, value, worse_by, error, is_main)
            )
    return rows


def _with_parts(rows: Sequence[AblationRow]) -> list[AblationRow]:
    """Remove measurements without ablations, such as those of `evaluate`."""
    titles = {row.title for row in rows if row.without}
    return [row for row in rows if row.title in titles]


def _apart_from_part(entry: dict) -> dict:
    return {name: value for name, value in entry["settings"].items() if name not in (KIND, WITHOUT)}


def _number(measure: Measure) -> tuple[str, float]:
    """Return metric and value; for perplexities the logarithm, whose differences are additive."""
    if measure.metric == "perplexity":
        return "loss", math.log(measure.value)
    return measure.metric, measure.value


def _tables(rows: Sequence[AblationRow]) -> Iterable[str]:
    """Format a table per model and measurement: one line per part; only the heads with the largest effect."""
    for model, title in dict.fromkeys((row.model, row.title) for row in rows):
        of_table = [row for row in rows if (row.model, row.title) == (model, title) and row.is_main]
        metrics = list(dict.fromkeys(row.metric for row in of_table))
        cells = {(row.without, row.metric): f"{row.value:.4f}" for row in of_table if not row.without}
        cells |= {(row.without, row.metric): _cell(row) for row in of_table if row.without}
        first = [row for row in of_table if row.metric == metrics[0]]
        heads = sorted((row for row in first if row.kind == "heads"), key=lambda row: -row.worse_by)
        shown = [row.without for row in first if row.kind != "heads"] + [row.without for row in heads[:SHOWN]]
        lines = [[name or "nothing", *(cells.get((name, metric), "-") for metric in metrics)] for name in shown]
        rest = (
            f" The {SHOWN} of {len(heads)} heads with the largest effect; ablation.csv has all."
            if len(heads) > SHOWN
            else ""
        )
        message = f"In brackets: how much worse than the full model{_of_errors(of_table)}.{rest}"
        yield f"{model}, {title}\n\n{markdown_table(['without', *metrics], lines)}\n\n{message}"


def _cell(row: AblationRow) -> str:
    error = "" if row.stderr is None else f" ± {row.stderr:.4f}"
    return f"{row.value:.4f} ({row.worse_by:+.4f}{error})"


def _of_errors(rows: Sequence[AblationRow]) -> str:
    """Describe the standard errors, if there are any."""
    known = any(row.stderr is not None for row in rows)
    return ", with a standard error as if all answers were independent, of one model and of both" if known else ""


def _draw(model: str, rows: Sequence[AblationRow]) -> Figure:
    """Plot the effect on the first metric, one row per measurement: bars for branches and layers, a heat map of
    heads."""
    titles = list(dict.fromkeys(row.title for row in rows))
    shown = [_main_rows([row for row in rows if row.title == title]) for title in titles]
    kinds = [kind for kind in KINDS if any(row.kind == kind for row in rows)]
    figure = Figure(figsize=(6 * len(kinds), 4.5 * len(shown)), layout="constrained")
    for part, of_title in zip(figure.subfigures(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        part.suptitle(f"{model}, {of_title[0].title}: {of_title[0].metric}, worse by", fontsize=10, parse_math=False)
        for axes, kind in zip(part.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
            _draw_kind(axes, [row for row in of_title if row.kind == kind], kind)
    return figure


def _main_rows(rows: Sequence[AblationRow]) -> list[AblationRow]:
    """Keep only rows of the first metric, of whole measurements, with a disabled part."""
    return [row for row in rows if row.metric == rows[0].metric and row.is_main and row.kind]


def _draw_kind(axes: Axes, rows: Sequence[AblationRow], kind: str) -> None:
    if not rows:
        axes.axis("off")
    elif kind == "heads":
        layers, values = by_layer(_place(row) for row in rows)
        draw_map(axes, values, f"without {TITLES[kind]}", rows=layers)
    else:
        _draw_bars(axes, rows, f"without {TITLES[kind]}")


def _place(row: AblationRow) -> tuple[str, int, float]:
    """Return layer, head and value of a row."""
    head, _, layer = row.without.removeprefix("head ").partition(" of ")
    return layer, int(head), row.worse_by


def _draw_bars(axes: Axes, rows: Sequence[AblationRow], title: str) -> None:
    names = [row.without.removeprefix("composition of ") for row in rows]
    errors = [row.stderr or 0.0 for row in rows]
    axes.barh(names, [row.worse_by for row in rows], color="C0", xerr=errors if any(errors) else None)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", alpha=0.3)

"""What an ablation found, as a table and a picture: the numbers of the whole model, and by how much each part changes
them.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..evaluation.results import Measure, Results
from ..utils.markdown import markdown_table
from .ablation import KIND, KINDS, WITHOUT, without_title
from .explanation import Explanation, write_explanation
from .heatmaps import by_layer, draw_map

SPEEDS = ("images_per_second",)
TITLES = {"branches": "a branch, in all layers", "layers": "the composition of a layer", "heads": "a head"}
SHOWN = 12  # of the heads, in the printed table: those that matter most


class AblationRow(NamedTuple):
    """A number of a model without a part.

    Attributes:
        model: Name of the model.
        title: Of the measurement.
        measured: Of what, such as a part of a data set.
        metric: Which; perplexities are told as "loss", in nats per token.
        kind: What kind of part is missing; "" for the whole model.
        without: The part; "" for none.
        value: The number.
        worse_by: By how much it is worse than that of the whole model.
        stderr: Standard error of that, as if all answers were independent, of both models too; None if unknown, and of
            the whole model.
        is_main: Whether it is of all that was measured, and not of a part of that.
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


def report_ablation(models: Sequence[Results], folder: Path) -> None:
    """Print tables of models that were measured; write ablation.csv, and a picture of each model."""
    write_explanation(explain_ablation(models), folder, (), {})  # each model's results say where they come from


def explain_ablation(models: Sequence[Results]) -> Explanation:
    """Tell of models that were measured whole and without parts."""
    rows = [row for results in models for row in _with_parts(_rows(results))]
    names = dict.fromkeys(row.model for row in rows)
    pictures = {f"{name}-ablation": _draw(name, [row for row in rows if row.model == name]) for name in names}
    reading = (
        "The model is evaluated again with one part switched off at a time. The larger the number in brackets, the more"
        " the model needs that part."
    )
    return Explanation("Without parts of the model", reading, "\n\n".join(_tables(rows)), pictures, {"ablation": rows})


def _rows(results: Results) -> list[AblationRow]:
    """Compare each ablation with the whole model, measured alike; of other settings, such as an earlier limit, none."""
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
    """Leave out what was measured of the whole model alone, such as by `evaluate`."""
    titles = {row.title for row in rows if row.without}
    return [row for row in rows if row.title in titles]


def _apart_from_part(entry: dict) -> dict:
    return {name: value for name, value in entry["settings"].items() if name not in (KIND, WITHOUT)}


def _number(measure: Measure) -> tuple[str, float]:
    """Tell which number it is, and how large; of perplexities their logarithm, whose differences add up."""
    if measure.metric == "perplexity":
        return "loss", math.log(measure.value)
    return measure.metric, measure.value


def _tables(rows: Sequence[AblationRow]) -> Iterable[str]:
    """Write a table for each model and thing measured: a line for each part, of heads those that matter most."""
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
            f" Of {len(heads)} heads the {SHOWN} that matter most; ablation.csv has all." if len(heads) > SHOWN else ""
        )
        said = f"In brackets: by how much it is worse than the whole model{_of_errors(of_table)}.{rest}"
        yield f"{model}, {title}\n\n{markdown_table(['without', *metrics], lines)}\n\n{said}"


def _cell(row: AblationRow) -> str:
    error = "" if row.stderr is None else f" ± {row.stderr:.4f}"
    return f"{row.value:.4f} ({row.worse_by:+.4f}{error})"


def _of_errors(rows: Sequence[AblationRow]) -> str:
    """Say what the standard errors are, where there are some."""
    known = any(row.stderr is not None for row in rows)
    return ", with a standard error as if all answers were independent, of one model and of both" if known else ""


def _draw(model: str, rows: Sequence[AblationRow]) -> Figure:
    """Draw how much worse the first metric gets, a row for each thing measured: bars for branches and layers, a map of
    the heads.
    """
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
    """Leave out all metrics but the first, parts of a set, and the whole model."""
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
    """Tell the layer and the number of the head that a row is of."""
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

"""`explain diversity`: diversity of the heads of models (paper, figure 5), as a table and a figure."""

# K principal components

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from dcmha.analysis import Diversity, attention_layers, head_diversity

from ..checkpointing.checkpoint import make_folder
from ..errors import as_user_error
from ..evaluation.run import name_models
from ..utils.markdown import markdown_table
from .explanation import Explanation, Origin, origin_of, write_explanation

KINDS = {"qk": "QK", "ov": "OV"}
MOST = 0.9  # share of the variance for which components are counted


class DiversityRow(NamedTuple):
    """Diversity of one kind of matrices of one layer.

    Attributes:
        model: Name of the model.
        layer: Name of the layer.
        kind: "QK" or "OV".
        components: Number of components.
        mean_captured: Mean of the cumulative captured variance over the number of components: 0.5 if all are equal, 1
            if one has all. Lower is more diverse.
        components_for_90: Share of the components that capture 90 % of the variance. Higher is more diverse.
    """

    model: str
    layer: str
    kind: str
    components: int
    mean_captured: float
    components_for_90: float


def diversity_command(load: Callable[[str], nn.Module]) -> Callable[..., None]:
    """Create the subcommand of a trainer.

    Args:
        load: Loads the model of a checkpoint.
    """

    def diversity(checkpoint: Sequence[str], out: str = "diversity") -> None:
        """Compare the diversity of the heads of models by the variance that components of their weights capture.

        For each layer the matrices W_Q W_K^T, and W_O W_V, of all heads are concatenated; if heads are similar, few
        principal components capture most of the variance (paper, section 4.3 and figure 5). Biases and norms are not
        used. At most two models, and the weights of one layer in float64, are in memory.

        Args:
            checkpoint: Models, composed or plain: runs, checkpoints, and folders of supported formats.
            out: Folder for diversity.png, and diversity.csv with every layer.

        Raises:
            UserError: If a model cannot be read or has no attention layers, or a file cannot be written.
        """
        folder, origins = make_folder(out), list[Origin]()

        def loaded() -> Iterator[tuple[str, nn.Module]]:
            for name, path in zip(name_models(checkpoint), checkpoint, strict=True):
                model = load(path)
                origins.append(origin_of(path, model))
                yield name, model

        write_explanation(explain_diversity(loaded()), folder, origins, {"checkpoint": checkpoint})

    return diversity


def explain_diversity(models: Iterable[tuple[str, nn.Module]]) -> Explanation:
    """Measure named models sequentially.

    Raises:
        UserError: If a model has no attention layers.
    """
    curves = {name: _measure(model, name) for name, model in models}
    rows = [row for name, layers in curves.items() for layer, one in layers.items() for row in _rows(name, layer, one)]
    figures, tables = {"diversity": _draw(curves)}, {"diversity": rows}
    reading = (
        "Share of the variance of a layer's heads captured by the first principal components, as in figure 5 of the "
        "paper. A slowly rising curve, and a low captured variance, mean that the heads are diverse."
    )
    return Explanation("Diversity of the heads", reading, _table(rows), figures, tables)


def _measure(model: nn.Module, name: str) -> dict[str, Diversity]:
    with as_user_error(name):
        layers = attention_layers(model)
    return {
        layer: head_diversity(module) for layer, module in tqdm(layers.items(), desc=name, unit="layer", leave=False)
    }


def _rows(model: str, layer: str, found: Diversity) -> list[DiversityRow]:
    rows = []
    for field, kind in KINDS.items():
        curve = getattr(found, field)
        count = int((curve < MOST).sum()) + 1
        rows.append(DiversityRow(model, layer, kind, len(curve), float(curve.mean()), count / len(curve)))
    return rows


def _table(rows: Sequence[DiversityRow]) -> str:
    """Average the layers of each model."""
    lines = []
    for model in dict.fromkeys(row.model for row in rows):
        for kind in KINDS.values():
            of_kind = [row for row in rows if (row.model, row.kind) == (model, kind)]
            captured, count = (np.mean([getattr(row, name) for row in of_kind]) for name in DiversityRow._fields[-2:])
            lines.append([model, kind, str(len(of_kind)), f"{100 * captured:.1f} %", f"{100 * count:.1f} %"])
    header = ["model", "matrices", "layers", "mean captured variance", "components for 90 %"]
    return markdown_table(header, lines) + "\n\nLower captured variance is higher diversity."


def _draw(models: Mapping[str, Mapping[str, Diversity]]) -> Figure:
    """Plot the captured variance of each model: mean and range over layers."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (field, kind) in zip(figure.subplots(1, 2, sharey=True), KINDS.items(), strict=True):
        for model, layers in models.items():
            _draw_model(axes, model, [getattr(found, field) for found in layers.values()])
        axes.set(
            title=f"{kind} matrices of the heads", xlabel="share of the principal components", xlim=(0, 1), ylim=(0, 1)
        )
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("cumulative captured variance")
    figure.axes[0].legend(loc="lower right", fontsize=8)
    return figure


def _draw_model(axes: Axes, model: str, curves: Sequence[Tensor]) -> None:
    """Plot over the share of components, so that layers and models of different width have the same axis."""
    shares = np.linspace(0, 1, max(map(len, curves)) + 1)
    drawn = np.stack([np.interp(shares, np.linspace(0, 1, len(c) + 1), [0, *c.tolist()]) for c in curves])
    (line,) = axes.plot(shares, drawn.mean(0), label=f"{model} ({len(curves)} layers)")
    axes.fill_between(shares, drawn.min(0), drawn.max(0), color=line.get_color(), alpha=0.15, linewidth=0)

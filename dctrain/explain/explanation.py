"""Explanation: the common form of results - text for the terminal, figures, tables - and writing it."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from torch import nn

from ..errors import as_user_error
from ..evaluation.results import checksum
from ..utils.environment import environment
from ..utils.files import atomic_write, relative, write_json

DPI = 120


class Explanation(NamedTuple):
    """Result of an `explain` command.

    Attributes:
        title: Title.
        reading: What it shows and how to read it, in two sentences.
        text: The most important numbers, as Markdown.
        figures: Figures by file name.
        tables: All numbers by file name: lists of named tuples of one type, not empty.
    """

    title: str
    reading: str
    text: str
    figures: Mapping[str, Figure]
    tables: Mapping[str, Sequence[NamedTuple]]


class Origin(NamedTuple):
    """Provenance of numbers.

    Attributes:
        checkpoint: The given checkpoint.
        weights_crc32: Checksum of its weights.
        dtype: Dtype of the weights.
        environment: Device, versions and commit.
    """

    checkpoint: str
    weights_crc32: int
    dtype: str
    environment: dict


def origin_of(checkpoint: str, model: nn.Module) -> Origin:
    """Return the origin of a loaded model."""
    weight = next(model.parameters())
    return Origin(checkpoint, checksum(model), str(weight.dtype).removeprefix("torch."), environment(weight.device))


def write_explanation(found: Explanation, folder: Path, origins: Sequence[Origin], asked: Mapping[str, object]) -> None:
    """Write tables (.csv), figures (.png) and their provenance (.json, named like the first table) to a folder.

    The text and the paths of the files are printed.

    Args:
        found: The explanation.
        folder: Output folder.
        origins: Origins of the models; empty if the tables have the provenance.
        asked: Arguments of the command.

    Raises:
        UserError: If a file cannot be written.
    """
    for name, rows in found.tables.items():
        text = io.StringIO()
        writer = csv.writer(text)  # lines end with \r\n, so that tokens with line breaks are quoted
        writer.writerow(rows[0]._fields)
        writer.writerows(rows)
        _write(folder / f"{name}.csv", text.getvalue().encode())
    for name, figure in found.figures.items():
        _write(folder / f"{name}.png", as_png(figure))
    print(f"{found.title}\n\n{found.reading}\n\n{found.text}\n")
    files = [f"{name}.csv" for name in found.tables] + [f"{name}.png" for name in found.figures]
    if origins:
        files.append(f"{next(iter(found.tables))}.json")
        models = [origin._asdict() for origin in origins]
        write_json(folder / files[-1], {"title": found.title, "asked": dict(asked), "models": models})
    print(*(relative(folder / name) for name in files), sep="\n")


def as_png(figure: Figure) -> bytes:
    """Render a figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=DPI, format="png")
    return buffer.getvalue()


def _write(path: Path, content: bytes) -> None:
    with as_user_error(f"{path} cannot be written"), atomic_write(path) as file:
        file.write(content)

"""What every explanation is: a text for the terminal, pictures, and rows of numbers; and how it is written."""

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
    """What has been found.

    Attributes:
        title: What it is of.
        reading: What it shows, and how to read it, in two sentences.
        text: The most important numbers, as Markdown.
        pictures: Pictures, by the name of their file.
        tables: All numbers, by the name of their file: named tuples of one kind, at least one.
    """

    title: str
    reading: str
    text: str
    pictures: Mapping[str, Figure]
    tables: Mapping[str, Sequence[NamedTuple]]


class Origin(NamedTuple):
    """Where numbers come from.

    Attributes:
        checkpoint: As it was named.
        weights_crc32: Checksum of its weights.
        dtype: Of the weights.
        environment: Device, versions and commit.
    """

    checkpoint: str
    weights_crc32: int
    dtype: str
    environment: dict


def origin_of(checkpoint: str, model: nn.Module) -> Origin:
    """Tell of a model that has been loaded."""
    weight = next(model.parameters())
    return Origin(checkpoint, checksum(model), str(weight.dtype).removeprefix("torch."), environment(weight.device))


def write_explanation(found: Explanation, folder: Path, origins: Sequence[Origin], asked: Mapping[str, object]) -> None:
    """Write tables (.csv), pictures (.png) and where they come from (.json, called like the first table) into a folder.

    The text is printed, and where the files are.

    Args:
        found: What has been found.
        folder: Where to write.
        origins: Of the models; none if the numbers say themselves where they come from.
        asked: Arguments of the command.

    Raises:
        UserError: If a file cannot be written.
    """
    for name, rows in found.tables.items():
        text = io.StringIO()
        writer = csv.writer(text)  # ends lines by \r\n, so that a token which is one of them stands in quotes
        writer.writerow(rows[0]._fields)
        writer.writerows(rows)
        _write(folder / f"{name}.csv", text.getvalue().encode())
    for name, figure in found.pictures.items():
        _write(folder / f"{name}.png", as_png(figure))
    print(f"{found.title}\n\n{found.reading}\n\n{found.text}\n")
    files = [f"{name}.csv" for name in found.tables] + [f"{name}.png" for name in found.pictures]
    if origins:
        files.append(f"{next(iter(found.tables))}.json")
        models = [origin._asdict() for origin in origins]
        write_json(folder / files[-1], {"title": found.title, "asked": dict(asked), "models": models})
    print(*(relative(folder / name) for name in files), sep="\n")


def as_png(figure: Figure) -> bytes:
    """Draw a figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=DPI, format="png")
    return buffer.getvalue()


def _write(path: Path, content: bytes) -> None:
    with as_user_error(f"{path} cannot be written"), atomic_write(path) as file:
        file.write(content)

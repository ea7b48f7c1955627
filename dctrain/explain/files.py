"""What every explanation writes: rows as CSV, and a table on the terminal."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..cli import relative
from ..errors import told_as
from ..files import written_whole


def write_rows(path: Path, rows: Sequence[NamedTuple]) -> None:
    """Write named tuples of one kind, at least one, as CSV.

    Raises:
        UserError: If the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text)  # ends lines by \r\n, so that a token which is one of them stands in quotes
    writer.writerow(rows[0]._fields)
    writer.writerows(rows)
    with told_as(f"{path} cannot be written"), written_whole(path) as file:
        file.write(text.getvalue().encode())


def report(table: str, folder: Path, names: Sequence[str]) -> None:
    """Print a table and where the files are."""
    print(f"{table}\n")
    print(*(relative(folder / name) for name in names), sep="\n")

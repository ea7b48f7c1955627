"""Texts with Markdown tables, and matplotlib figures, as parts of an HTML page."""

import html
import io
import re
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

_CELL = re.compile(r"(?<!\\)\|")
_RULE = re.compile(r"\|[-:| ]+\|")
_GROUP = re.compile(r'<g id="[^"]*"')


def text_html(text: str) -> str:
    """Write paragraphs and tables, which `markdown_table` made, as HTML. A click on a column's head sorts a table."""
    return "".join(_block(block) for block in re.split(r"\n{2,}", text.strip()) if block)


def table_html(header: Sequence[str], rows: Sequence[Sequence[str]], is_numeric: Sequence[bool]) -> str:
    """Write a table as HTML.

    Args:
        header: Names of the columns.
        rows: Cells, as they are shown.
        is_numeric: Of each column, whether it stands on the right.
    """
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    classes = [' class="number"' if numeric else "" for numeric in is_numeric]
    lines = (
        "".join(f"<td{of}>{html.escape(cell)}</td>" for of, cell in zip(classes, row, strict=True)) for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def figure_svg(figure: Figure, label: str) -> str:
    """Draw a figure as inline SVG of its own size, whose letters stay as large as they are on narrow screens.

    Args:
        figure: The figure.
        label: What it shows, for those who cannot see it; differs from those of the page's other figures.
    """
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawing = _GROUP.sub("<g", buffer.getvalue())  # names that other figures have, and nothing refers to
    opening, _, content = drawing[drawing.index("<svg") :].partition(">")
    content = re.sub(r"<metadata>.*?</metadata>", "", content, flags=re.DOTALL)
    size = " ".join(re.findall(r'(?:width|height|viewBox)="[^"]*"', opening))
    return f'<div class="scroll"><svg {size} role="img" aria-label="{html.escape(label)}">{content.strip()}</div>'


def _block(block: str) -> str:
    lines = block.split("\n")
    if len(lines) < 2 or not _RULE.fullmatch(lines[1]):
        return f"<p>{html.escape(block)}</p>"
    header, *rows = (_cells(line) for line in (lines[0], *lines[2:]))
    return table_html(header, rows, [rule.endswith(":") for rule in _cells(lines[1])])


def _cells(line: str) -> list[str]:
    """Take the cells out of a line of a Markdown table."""
    return [cell.strip().replace("\\|", "|") for cell in _CELL.split(line)[1:-1]]

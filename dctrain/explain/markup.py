"""Conversion of text with Markdown tables, and of matplotlib figures, to HTML."""

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
    """Convert paragraphs and tables of `markdown_table` to HTML. Tables are sorted by clicking on a column header."""
    return "".join(_block(block) for block in re.split(r"\n{2,}", text.strip()) if block)


def table_html(header: Sequence[str], rows: Sequence[Sequence[str]], is_numeric: Sequence[bool]) -> str:
    """Format an HTML table.

    Args:
        header: Column names.
        rows: Formatted cells.
        is_numeric: Whether each column is right-aligned.
    """
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    classes = [' class="number"' if numeric else "" for numeric in is_numeric]
    lines = (
        "".join(f"<td{of}>{html.escape(cell)}</td>" for of, cell in zip(classes, row, strict=True)) for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def figure_svg(figure: Figure, label: str) -> str:
    """Render a figure as inline SVG of fixed size, so that text stays readable on narrow screens.

    Args:
        figure: The figure.
        label: Accessible description, unique within the page.
    """
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawing = _GROUP.sub("<g", buffer.getvalue())  # ids that repeat in other figures and are not referenced
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
    """Split a line of a Markdown table into cells."""
    return [cell.strip().replace("\\|", "|") for cell in _CELL.split(line)[1:-1]]

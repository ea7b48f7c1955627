"""Markdown tables for terminals and files."""

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with aligned columns: text on the left, cells that start with a digit or sign on the
    right.
    """
    lines = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in (header, *rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(header))]
    is_numeric = [all(_is_number(line[column]) for line in lines[1:]) for column in range(len(header))]
    rule = ["-" * (width - 1) + ":" if right else "-" * width for width, right in zip(widths, is_numeric, strict=True)]

    def write(line: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_numeric, strict=True)
        )
        return f"| {' | '.join(cells)} |"

    return "\n".join([write(lines[0]), write(rule), *map(write, lines[1:])])


def _is_number(cell: str) -> bool:
    return cell == "-" or cell[:1].isdigit() or (cell[:1] in "+-" and cell[1:2].isdigit())

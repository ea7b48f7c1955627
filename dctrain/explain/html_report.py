"""`explain report`: a self-contained HTML page with SVG figures, sortable tables and interactive attention maps."""

# T tokens, H heads

import base64
import html
import io
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from dcmha.analysis import Recorded

from ..checkpointing.checkpoint import make_folder
from ..errors import UserError, as_user_error
from ..utils.files import atomic_write
from .explanation import Explanation, Origin
from .markup import figure_svg, table_html, text_html

ROWS = 1000  # maximum rows of a table; omitted rows are reported
LEVELS = 127
MAX_BYTES = 64 * 2**20  # of maps in a page


def check_size(heads: int, tokens: int) -> None:
    """Check that a page with the maps of all heads is small enough for a browser.

    Raises:
        UserError: If not.
    """
    most = int((MAX_BYTES / (2 * max(1, heads))) ** 0.5)
    if tokens > most:
        raise UserError(f"{tokens} tokens are too many for a page with {heads} heads; expected at most {most}.")


class PageMaps(NamedTuple):
    """Quantized attention of one layer on one sequence.

    Attributes:
        before: Attention weights without any composition, int8 [H, T, T], in units of `before_scale` / 127.
        before_scale: Maximum of each query [H, T].
        after: Composed attention weights, int8.
        after_scale: Like `before_scale`.
    """

    before: Tensor
    before_scale: Tensor
    after: Tensor
    after_scale: Tensor


def model_facts(origin: Origin, model: nn.Module) -> str:
    """Describe a model and its environment in one line."""
    parameters, where = sum(parameter.numel() for parameter in model.parameters()), origin.environment
    what = f"{origin.checkpoint}, {parameters:,} parameters, {origin.dtype}, weights {origin.weights_crc32:08x}"
    return f"{what}; commit {where['commit']}, torch {where['torch']}, {where['device']}."


def small_maps(recorded: Recorded) -> PageMaps:
    """Quantize the attention of a recorded call's first sequence.

    Raises:
        UserError: If attention is not finite.
    """
    if not recorded.maps.composed_weights.isfinite().all():
        raise UserError("attention is not finite: the weights are damaged or too large for their dtype.")
    return PageMaps(*_quantized(recorded.uncomposed_weights[0]), *_quantized(recorded.maps.composed_weights[0]))


class PageSubject(NamedTuple):
    """The sequence or image of a page.

    Attributes:
        words: Names of the tokens [T].
        grid: Rows and columns of the patches of an image; None for a text.
        prefix: Number of tokens before the patches.
        pixels: The image, uint8 [3, height, width]; None for a text.
    """

    words: Sequence[str]
    grid: tuple[int, int] | None = None
    prefix: int = 0
    pixels: Tensor | None = None


def page_path(out: str) -> Path:
    """Return the file of `--out`: a path that ends in .html, or index.html in a folder, which is created.

    Raises:
        UserError: If the folder cannot be created.
    """
    path = Path(out)
    if path.suffix.lower() not in (".html", ".htm"):
        path = path / "index.html"
    make_folder(str(path.parent))
    return path


def write_page(
    path: Path,
    title: str,
    facts: str,
    shown: PageSubject,
    maps: dict[str, PageMaps],
    found: Sequence[Explanation],
) -> None:
    """Write the page.

    Args:
        path: Output file.
        title: Title of the page.
        facts: Description of the model in one line.
        shown: The sequence or image.
        maps: Attention by layer name.
        found: Further explanations.

    Raises:
        UserError: If the file cannot be written.
    """
    sections = [("attention", "Attention of the heads", _attention(shown, maps))]
    sections += [(f"part-{number}", one.title, _section(one)) for number, one in enumerate(found)]
    links = "".join(f'<a href="#to-{anchor}">{html.escape(name)}</a>' for anchor, name, _ in sections)
    body = "".join(f'<h2 id="to-{anchor}">{html.escape(name)}</h2>{content}' for anchor, name, content in sections)
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_resource('page.css')}</style></head><body>"
        f'<h1>{html.escape(title)}</h1><p class="note">{html.escape(facts)}</p>'
        f"<nav>{links}</nav>{body}"
        f"<script>{_resource('page.js')}</script></body></html>\n"
    )
    with as_user_error(f"{path} cannot be written"), atomic_write(path) as file:
        file.write(page.encode())


def _resource(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize maps [H, T, T] to int8, each query of each head scaled by its maximum."""
    scale = values.abs().amax(2)
    rounded = values / scale.clamp(min=torch.finfo(values.dtype).tiny)[..., None] * LEVELS
    return rounded.round().to(torch.int8).cpu(), scale.cpu()


def _attention(shown: PageSubject, maps: dict[str, PageMaps]) -> str:
    if not maps:
        return '<p class="note">The model has no attention layers that support recording.</p>'
    layers = [
        {
            "name": name,
            "heads": len(one.before),
            "before": _base64(one.before.numpy().tobytes()),
            "before_scale": one.before_scale.tolist(),
            "after": _base64(one.after.numpy().tobytes()),
            "after_scale": one.after_scale.tolist(),
        }
        for name, one in maps.items()
    ]
    content = {"words": list(shown.words), "layers": layers, "grid": shown.grid, "prefix": shown.prefix}
    content["is_spaced"] = not any(word[:1].isspace() for word in shown.words[1:])
    content["picture"] = None if shown.pixels is None else _inline(_png(shown.pixels))
    message = (
        "Attention from the selected token or patch to all others in one head, before and after composition, and below "
        "in all heads of the layer. Hover over or tap a head to select it; click a token or patch to select it as the "
        "query. Red is positive, blue is negative."
    )
    script = json.dumps(content).replace("<", "\\u003c")
    return (
        f'<p class="note">{message}</p><div id="attention"></div>'
        f'<script type="application/json" id="attention-data">{script}</script>'
    )


def _section(found: Explanation) -> str:
    figures = "".join(figure_svg(figure, f"{found.title}: {name}") for name, figure in found.figures.items())
    tables = "".join(_table(name, rows) for name, rows in found.tables.items())
    return f'<p class="note">{html.escape(found.reading)}</p>{text_html(found.text)}{figures}{tables}'


def _table(name: str, rows: Sequence[NamedTuple]) -> str:
    """Format a table of an explanation, with at most `ROWS` rows."""
    header = [field.replace("_", " ") for field in rows[0]._fields]
    is_numeric = [all(isinstance(value, int | float | None) for value in column) for column in zip(*rows, strict=True)]
    rest = f", the first {ROWS}" if len(rows) > ROWS else ""
    table = table_html(header, [[_cell(value) for value in row] for row in rows[:ROWS]], is_numeric)
    return f"<details><summary>all numbers: {html.escape(name)}, {len(rows)} lines{rest}</summary>{table}</details>"


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _png(pixels: Tensor) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy()).save(buffer, format="PNG")
    return buffer.getvalue()


def _inline(png: bytes) -> str:
    return f"data:image/png;base64,{_base64(png)}"


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()

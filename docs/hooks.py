"""MkDocs hooks: add linked repository files to the site, and convert equations to MathML."""

import re
from collections.abc import Callable
from html import escape
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"\]\(\.\./([^)#\s]+)")
DISPLAYED = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<![\\$\w])\$([^$\n]+)\$(?![$\w])")
CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add files that pages link to as `../PATH` to the site as `repository/PATH`."""
    root = Path(config.config_file_path).parent
    paths = {path for page in files.documentation_pages() for path in LINK.findall(page.content_string)}
    for path in sorted(paths):
        files.append(File.generated(config, f"repository/{path}", abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Update links to the added files, and replace equations outside code with placeholders, unchanged by Markdown."""
    page.equations = []

    def keep(display: str) -> Callable[[re.Match], str]:
        def replace(match: re.Match) -> str:
            page.equations.append(_mathml(match[1], display))
            return f"EQUATION{len(page.equations) - 1}END"

        return replace

    parts = CODE.split(LINK.sub(r"](repository/\1", markdown))
    for number in range(0, len(parts), 2):
        parts[number] = INLINE.sub(keep("inline"), DISPLAYED.sub(keep("block"), parts[number]))
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the placeholders with the equations."""
    return re.sub(r"EQUATION(\d+)END", lambda match: page.equations[int(match[1])], html)


def _mathml(latex: str, display: str) -> str:
    """Convert an equation to MathML, with its LaTeX source as label for screen readers."""
    math = convert(latex, display=display).replace("<math ", f'<math aria-label="{escape(latex, quote=True)}" ', 1)
    return f'<span class="equation">{math}</span>' if display == "block" else math

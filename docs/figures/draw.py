"""Draw the architecture figure: `python docs/figures/draw.py` writes architecture-light.svg and -dark.svg."""

from pathlib import Path

WIDTH, HEIGHT = 860, 250
COLORS = {
    "light": {"text": "#1f2328", "line": "#656d76", "plain": "#eaeef2", "compose": "#ddf4ff", "edge": "#0969da"},
    "dark": {"text": "#e6edf3", "line": "#8b949e", "plain": "#21262d", "compose": "#0c2d6b", "edge": "#58a6ff"},
}
BOXES = [  # x, y, width, lines, whether the box is part of a composition
    (10, 30, 90, ["Q, K, V"], False),
    (150, 30, 110, ["scores", "Q Kᵀ / √d"], False),
    (310, 30, 120, ["pre-compose", "mix heads"], True),
    (480, 30, 90, ["softmax"], False),
    (620, 30, 120, ["post-compose", "mix heads"], True),
    (780, 30, 70, ["A V"], False),
    (150, 160, 250, ["per-token compose weights", "low rank (R = 2) + gate, from query i"], True),
    (480, 160, 260, ["per-token compose weights", "low rank (R = 2) + gate, from key j"], True),
]
ARROWS = [  # from, to
    ((100, 60), (150, 60)),
    ((260, 60), (310, 60)),
    ((430, 60), (480, 60)),
    ((570, 60), (620, 60)),
    ((740, 60), (780, 60)),
    ((330, 160), (350, 90)),
    ((380, 160), (640, 90)),
    ((500, 160), (400, 90)),
    ((680, 160), (690, 90)),
]


def box(x: int, y: int, width: int, lines: list[str], is_composition: bool, colors: dict[str, str]) -> str:
    """Draw a box with one or two lines of text."""
    fill, edge = (colors["compose"], colors["edge"]) if is_composition else (colors["plain"], colors["line"])
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="60" rx="8" fill="{fill}" stroke="{edge}"/>']
    first = y + 35 if len(lines) == 1 else y + 26
    for number, line in enumerate(lines):
        style = 'font-weight="600"' if number == 0 else 'font-size="12"'
        parts.append(f'<text x="{x + width / 2}" y="{first + 20 * number}" text-anchor="middle" {style}>{line}</text>')
    return "".join(parts)


def figure(theme: str) -> str:
    """Draw the figure as SVG."""
    colors = COLORS[theme]
    arrows = "".join(
        f'<line x1="{a}" y1="{b}" x2="{c}" y2="{d}" stroke="{colors["line"]}" marker-end="url(#head)"/>'
        for (a, b), (c, d) in ARROWS
    )
    note = "Every query-key pair (i, j) gets its own H x H mixing matrix; heads mix before and after the softmax."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="14" fill="{colors["text"]}"><defs>'
        f'<marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" '
        f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colors["line"]}"/></marker></defs>'
        f"{arrows}{''.join(box(*each, colors) for each in BOXES)}"
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle" font-size="13">{note}</text></svg>\n'
    )


if __name__ == "__main__":
    for theme in COLORS:
        (Path(__file__).parent / f"architecture-{theme}.svg").write_text(figure(theme))

"""Draws `architecture.svg` from the imports: `python docs/architecture.py`. A test knows when it is stale."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGE = CHECKOUT / "lightning_hiercomm"
PICTURE = Path(__file__).with_suffix(".svg")

WIDTH, HEIGHT, GAP, RISE = 250, 74, 26, 62  # of a room; between rooms, between floors
MARGIN, LANE = 20, 50  # around the house; beside it, for arrows over several floors
NOT_DRAWN = {"arguments"}  # everyone's: constructors that name what is wrong
STYLE = (
    "rect{fill:#e6eef5;stroke:#47525c}path{fill:none;stroke:#9aa7b2}.name{font:600 15px sans-serif}"
    ".says{font:11px sans-serif;fill:#47525c}"
)


@cache
def rooms() -> dict[str, str]:
    """The package's folders and the files of its root, each with the first sentence of its docstring."""
    says = {}
    for path in sorted(PACKAGE.iterdir()):
        source = path / "__init__.py" if path.is_dir() else path
        if source.suffix == ".py" and source.exists():
            docstring = ast.get_docstring(ast.parse(source.read_text())) or ""
            name = PACKAGE.name if path.name == "__init__.py" else path.stem
            says[name] = docstring.split("\n")[0].replace("``", "").rstrip(".;")
    return {name: docstring for name, docstring in says.items() if name not in NOT_DRAWN}


def imports() -> dict[str, set[str]]:
    """Which room imports from which others, also inside functions and for types only."""
    arrows: dict[str, set[str]] = {room: set() for room in rooms()}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        room = PACKAGE.name if room == "__init__" else room
        if room in arrows:
            arrows[room] |= {other for other in _imported(path) if other in arrows and other != room}
    return arrows


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        for first, *rest in (name.split(".") for name in names):
            if first == PACKAGE.name and not {*rest[:1]} & NOT_DRAWN:
                yield rest[0] if {*rest[:1]} & rooms().keys() else PACKAGE.name  # names of the root are its own


def floors(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Rooms by floor, from the ground up: each stands above all that it imports.

    Raises:
        ValueError: For rooms that import each other in a circle.
    """
    built: list[list[str]] = []
    placed: set[str] = set()
    while len(placed) < len(arrows):
        floor = sorted(room for room, others in arrows.items() if room not in placed and others <= placed)
        if not floor:
            raise ValueError(f"rooms import each other in a circle: {sorted(arrows.keys() - placed)}")
        built.append(floor)
        placed |= {*floor}
    return built


def direct(arrows: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The arrows without those that a longer way implies."""

    def reached(room: str) -> set[str]:
        return arrows[room].union(*(reached(other) for other in arrows[room]))

    return {
        room: {other for other in others if not any(other in reached(between) for between in others)}
        for room, others in arrows.items()
    }


def drawn() -> str:
    """The picture, as SVG."""
    arrows = direct(imports())
    storeys = floors(imports())[::-1]
    widest = max(map(len, storeys))
    width = 2 * (MARGIN + LANE) + widest * WIDTH + (widest - 1) * GAP
    height = 2 * MARGIN + len(storeys) * HEIGHT + (len(storeys) - 1) * RISE
    corner: dict[str, tuple[float, float]] = {}

    def from_above(room: str) -> float:  # below who imports it, so that few arrows cross
        above = [corner[other][0] for other, others in arrows.items() if room in others and other in corner]
        return sum(above) / len(above) if above else 0.0

    for row, floor in enumerate(storeys):
        left = (width - len(floor) * WIDTH - (len(floor) - 1) * GAP) / 2
        for column, room in enumerate(sorted(floor, key=from_above)):
            corner[room] = (left + column * (WIDTH + GAP), MARGIN + row * (HEIGHT + RISE))

    lines = [_arrow(corner[room], corner[other], width) for room in arrows for other in sorted(arrows[room])]
    for room, says in rooms().items():
        x, y = corner[room]
        lines.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="4"/>')
        lines.append(f'<text class="name" x="{x + 10:.0f}" y="{y + 20:.0f}">{escape(room)}</text>')
        for row, line in enumerate(textwrap.wrap(says, 39, max_lines=3, placeholder=" …")):
            lines.append(f'<text class="says" x="{x + 10:.0f}" y="{y + 37 + 14 * row:.0f}">{escape(line)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">'
    marker = (
        '<marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" style="fill:#9aa7b2"/></marker>'
    )
    ground = '<path d="M0 0H9999V9999H0z" style="fill:#fff;stroke:none"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", f"<defs>{marker}</defs>", ground, *lines, "</svg>", ""])


def _arrow(room: tuple[float, float], other: tuple[float, float], width: float) -> str:
    """From a room's lower edge to the next floor; further down it goes along the outside of the house."""
    (x, y), (to_x, to_y) = room, other
    if to_y - y <= HEIGHT + RISE:
        x, y, to_x, bend = x + WIDTH / 2, y + HEIGHT, to_x + WIDTH / 2, RISE / 2
        way = f"M{x:.0f} {y:.0f}C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_y - bend:.0f} {to_x:.0f} {to_y:.0f}"
    else:
        is_right = to_x + WIDTH / 2 > width / 2
        edge, lane = (WIDTH, width - MARGIN) if is_right else (0, MARGIN)
        way = f"M{x + edge:.0f} {y + 50:.0f}H{lane}V{to_y + 24:.0f}H{to_x + edge:.0f}"
    return f'<path d="{way}" marker-end="url(#arrow)"/>'


if __name__ == "__main__":
    PICTURE.write_text(drawn())

"""Draw `architecture.svg` from the imports of the package: `python docs/pictures/architecture.py`.

A test fails when the picture is stale.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from svg import arrow, box, picture, text

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "lightning_hiercomm"
PICTURE = Path(__file__).with_suffix(".svg")

WIDTH, HEIGHT, GAP, RISE = 250, 72, 26, 56
MARGIN, SIDE = 20, 50
NOT_DRAWN = {"arguments"}  # every package imports it
CAPTIONS = {
    "lightning_hiercomm": "the public names",
    "__main__": "the command line",
    "_lightning": "every private touch of Lightning, with its reason and its test",
    "batches": "batches in proportion to the ranks' speeds",
    "checkpoints": "plain checkpoints, per-rank shards, directories, durable writes",
    "comm": "moves tensors between ranks: torch, MPI, threads, shared memory, codecs",
    "control": "detects failed and stuck ranks, and stops all of them",
    "elastic": "nodes that leave and join: quorum, transaction, healing",
    "nodes": "topology, process groups, replicas, buckets",
    "planning": "doctor, and plan: which scheme a cluster needs",
    "run": "one fit without a Trainer: gradients, the averaged model, traffic",
    "schemes": "when and how replicas synchronize",
    "trainer": "strategies, their hooks and settings, the monitor",
}


@cache
def packages() -> frozenset[str]:
    """Return the folders of the package and the modules at its root."""
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return frozenset({PACKAGE.name if name == "__init__" else name for name in names} - NOT_DRAWN)


def imports() -> dict[str, set[str]]:
    """Return which package imports from which others, also inside functions and for types only."""
    arrows: dict[str, set[str]] = {package: set() for package in sorted(packages())}
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        package = PACKAGE.name if package == "__init__" else package
        if package in arrows:
            arrows[package] |= {other for other in _imported(path) if other in arrows and other != package}
    return arrows


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        for first, *rest in (name.split(".") for name in names):
            if first == PACKAGE.name and not {*rest[:1]} & NOT_DRAWN:
                yield rest[0] if {*rest[:1]} & packages() else PACKAGE.name  # names of the root are its own


def layers_of(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Return packages by layer, the lowest first: each is above all that it imports.

    Raises:
        ValueError: For packages that import each other in a cycle.
    """
    built: list[list[str]] = []
    placed: set[str] = set()
    while len(placed) < len(arrows):
        layer = sorted(package for package, others in arrows.items() if package not in placed and others <= placed)
        if not layer:
            raise ValueError(f"packages import each other in a cycle: {sorted(arrows.keys() - placed)}")
        built.append(layer)
        placed |= {*layer}
    return built


def direct(arrows: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the arrows without those that a longer path implies."""

    def reached(package: str) -> set[str]:
        return arrows[package].union(*(reached(other) for other in arrows[package]))

    return {
        package: {other for other in others if not any(other in reached(between) for between in others)}
        for package, others in arrows.items()
    }


def drawn() -> str:
    """Return the picture as SVG."""
    arrows = direct(imports())
    layers = layers_of(imports())[::-1]
    widest = max(map(len, layers))
    width = 2 * (MARGIN + SIDE) + widest * WIDTH + (widest - 1) * GAP
    height = 2 * MARGIN + len(layers) * HEIGHT + (len(layers) - 1) * RISE
    corner: dict[str, tuple[float, float]] = {}

    def from_above(package: str) -> float:  # below its importers, so that few arrows cross
        above = [corner[other][0] for other, others in arrows.items() if package in others and other in corner]
        return sum(above) / len(above) if above else 0.0

    for row, layer in enumerate(layers):
        left = (width - len(layer) * WIDTH - (len(layer) - 1) * GAP) / 2
        for column, package in enumerate(sorted(layer, key=from_above)):
            corner[package] = (left + column * (WIDTH + GAP), MARGIN + row * (HEIGHT + RISE))

    parts = [_line(corner[package], corner[other], width) for package in arrows for other in sorted(arrows[package])]
    for package, (x, y) in corner.items():
        parts += [box(x, y, WIDTH, HEIGHT), text(x + 10, y + 21, package, "name")]
        for row, line in enumerate(textwrap.wrap(CAPTIONS[package], 38)):
            parts.append(text(x + 10, y + 39 + 15 * row, line, "small"))
    return picture(width, height, parts, "the packages of lightning_hiercomm, each above all that it imports")


def _line(package: tuple[float, float], other: tuple[float, float], width: float) -> str:
    """Draw from a lower edge to the next layer; further down, along the outside of the picture."""
    (x, y), (to_x, to_y) = package, other
    if to_y - y <= HEIGHT + RISE:
        x, y, to_x, bend = x + WIDTH / 2, y + HEIGHT, to_x + WIDTH / 2, RISE / 2
        return arrow(f"M{x:.0f} {y:.0f}C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_y - bend:.0f} {to_x:.0f} {to_y:.0f}")
    is_right = to_x + WIDTH / 2 > width / 2
    edge, side = (WIDTH, width - MARGIN) if is_right else (0, MARGIN)
    return arrow(f"M{x + edge:.0f} {y + 50:.0f}H{side}V{to_y + 24:.0f}H{to_x + edge:.0f}")


if __name__ == "__main__":
    PICTURE.write_text(drawn())

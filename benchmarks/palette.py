"""One colour per method, in every plot of this repository; safe for the colour-blind (Okabe and Ito, 2008).

Variants of a method (a narrower wire, another staleness) have its colour and another line; bounds are black and dotted.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from PIL import Image

COLOURS = {
    "ddp": "#555555",
    "all_reduce": "#0072B2",
    "periodic": "#D55E00",
    "daso": "#009E73",
    "diloco": "#CC79A7",
    "steps_delay": "#E69F00",
    "gossip": "#56B4E9",
    "power_sgd": "#999933",
    "hand": "#7F5A2A",
    "accelerate": "#B8860B",
    "torchft": "#6A3D9A",
    "post_local": "#8B1A1A",
    "torch_hierarchical": "#2F4F4F",
}
"""By method: DDP, this package's schemes by their names, and peers."""

_WIRES = {"bf16": "s", "int8": "^", "int4": "v", "sparse2": "D"}
_DASHES = ("-", "--", "-.", (0, (3, 1, 1, 1, 1, 1)))


def method_of(row: str) -> str | None:
    """The method that a benchmark's row is a variant of: the longest name it begins with; None for bounds."""
    return max((method for method in COLOURS if row.startswith(method)), key=len, default=None)


def colour_of(row: str) -> str:
    """The colour of a benchmark's row; black for bounds."""
    method = method_of(row)
    return "black" if method is None else COLOURS[method]


def styles_of(rows: list[str]) -> dict[str, dict[str, Any]]:
    """Return keywords of matplotlib's ``plot`` that draw a distinct line per row."""
    styles: dict[str, dict[str, Any]] = {}
    taken: dict[tuple[str | None, str], int] = {}
    for row in rows:
        method, wire = method_of(row), re.search(r"_(bf16|int8|int4|sparse2)(@|$)", row)
        marker = "o" if wire is None else _WIRES[wire[1]]
        if method is None:
            marker = ""
        nth = taken.get((method, marker), 0)
        taken[method, marker] = nth + 1
        dashes: Any = ":" if method is None else _DASHES[nth % len(_DASHES)]
        alpha = (0.9, 0.45)[nth % 2] if method is None else 1.0
        styles[row] = {"color": colour_of(row), "marker": marker, "linestyle": dashes, "alpha": alpha}
    return styles


def write_png(figure: Any, path: Path) -> None:
    """Write a matplotlib figure with a palette of 128 colours, which makes the file a third as large."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=90, bbox_inches="tight")
    Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, "PNG", optimize=True)

"""Draw simple pictures as SVG, without any other package."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

STYLE = (
    "text{font:13px sans-serif;fill:#222}.name{font:600 15px sans-serif}.small{font:11.5px sans-serif;fill:#47525c}"
    ".box{fill:#e6eef5;stroke:#47525c}.line{fill:none;stroke:#6b7a87;stroke-width:1.4}.dashed{stroke-dasharray:6 5}"
)
ARROW = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#6b7a87"/></marker></defs>'
)


def picture(width: float, height: float, parts: Iterable[str], title: str) -> str:
    """Return a picture with a white ground, which is readable in dark themes too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
        f' role="img" aria-label="{escape(title)}">'
    )
    ground = f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", ARROW, ground, *parts, "</svg>", ""])


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str = "", radius: float = 5) -> str:
    """Return a rectangle, of a colour or of the usual one."""
    look = f'fill="{colour}"' if colour else 'class="box"'
    return f'<rect {look} x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"/>'


def arrow(path: str, is_dashed: bool = False) -> str:
    """Return a line along an SVG path, with a head at its end."""
    return f'<path class="line{" dashed" if is_dashed else ""}" d="{path}" marker-end="url(#arrow)"/>'

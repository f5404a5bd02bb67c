"""Sphinx: `make docs` builds the site, and takes a warning for an error."""

import re
from pathlib import Path

project = "lightning-hiercomm"
author = "The lightning-hiercomm authors"
copyright = f"2026, {author}"
_SOURCE = Path(__file__).parents[1] / "lightning_hiercomm" / "__init__.py"
release = re.findall(r'^__version__ = "(.+)"$', _SOURCE.read_text(), re.MULTILINE)[0]

extensions = ["myst_parser"]
exclude_patterns = ["_build", "README.md"]  # index.rst includes it
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["width.css"]
html_title = f"lightning-hiercomm {release}"

myst_heading_anchors = 3

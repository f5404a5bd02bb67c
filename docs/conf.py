"""Sphinx: `make docs` builds the site, and takes a warning for an error."""

import contextlib
import io
import json
import os
from importlib import import_module
from pathlib import Path

from lightning_hiercomm.__main__ import main

project = "lightning-hiercomm"
author = "The lightning-hiercomm authors"
copyright = f"2026, {author}"
release = import_module("lightning_hiercomm").__version__


def _help(command: str) -> str:
    """Return the help of a command as a block of Markdown."""
    os.environ["COLUMNS"] = "80"
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main([command, "--help"])
    return f"```text\n{printed.getvalue()}```"


extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["width.css"]
html_title = f"lightning-hiercomm {release}"

myst_heading_anchors = 3
myst_enable_extensions = ["substitution"]
# written by `python -m benchmarks documents`
myst_substitutions = json.loads(Path(__file__).with_name("measured.json").read_text())
myst_substitutions |= {f"help_{name}": _help(name) for name in ("doctor", "plan", "lighthouse")}
highlight_language = "none"  # equations in docstrings are no programs; blocks in Markdown name their language

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # Lightning's hooks are documented by Lightning
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False

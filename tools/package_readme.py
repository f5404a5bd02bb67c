"""Make the README of the package index: hatchling calls this when it builds the package.

The index shows the README without the repository: its relative links become links to the tag of the version on GitHub.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "lightning-hiercomm/lightning-hiercomm"


def with_absolute_links(page: str, version: str) -> str:
    """Return the page with links that work outside the repository.

    Args:
        page: Markdown.
        version: The package's version, whose tag is ``v<version>``.
    """
    raw, blob = (
        f"https://raw.githubusercontent.com/{REPOSITORY}/v{version}/",
        f"https://github.com/{REPOSITORY}/blob/v{version}/",
    )
    page = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\g<1>{raw}", page)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{blob}", page)


class ReadmeHook(MetadataHookInterface):
    """Sets the field ``readme``."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        page = Path(self.root, "README.md").read_text(encoding="utf-8")
        source = Path(self.root, "lightning_hiercomm", "__init__.py").read_text(encoding="utf-8")
        (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
        metadata["readme"] = {"content-type": "text/markdown", "text": with_absolute_links(page, version)}

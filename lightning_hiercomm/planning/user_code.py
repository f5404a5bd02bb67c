"""Import what a user names on the command line."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

from lightning_hiercomm.planning.cluster import PlanningError


def load_object(flag: str, path: str) -> Any:
    """Import ``"package.module:name"``, also from the working directory.

    Raises:
        PlanningError: If it cannot be imported; the message starts with the flag.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise PlanningError(f"{flag} {path!r} must look like package.module:name")
    if os.getcwd() not in sys.path:  # not every launcher adds it
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PlanningError(f"{flag} {path!r} cannot be imported: {error}") from error


def json_object(flag: str, text: str | None, example: str) -> dict[str, Any]:
    """Read keyword arguments from a JSON object; None gives no arguments.

    Raises:
        PlanningError: If it is not a JSON object; the message starts with the flag.
    """
    try:
        values = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise PlanningError(f"{flag} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise PlanningError(f"{flag} must be a JSON object, such as {example}")
    return values

"""A Trainer and a module by the hooks that a test looks at."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch.demos.boring_classes import BoringModel
from problems import one_trainer

quiet = partial(one_trainer, None, enable_checkpointing=False)


def boring(**hooks: Any) -> BoringModel:
    """A BoringModel with hooks of the test's own."""
    return type("Boring", (BoringModel,), hooks)()

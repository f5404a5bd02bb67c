"""lightning-hiercomm: HierarchicalStrategy with each of its schemes."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders.lightning import fit
from benchmarks.job import Recorder
from lightning_hiercomm import HierarchicalStrategy, schemes


def train(recorder: Recorder, options: dict[str, Any]) -> None:
    scheme: schemes.Scheme = getattr(schemes, options["scheme"])(**options["arguments"])
    fit(recorder, HierarchicalStrategy(scheme=scheme, **options["strategy"]))

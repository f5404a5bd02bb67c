"""Nodes that are threads share a processor: they wait for each other, and would hand it on anyway."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_hiercomm.comm.threads import on_one_processor


@pytest.fixture(autouse=True)
def nodes_share_a_processor(request: pytest.FixtureRequest) -> Iterator[None]:
    with on_one_processor(wanted="ElasticRank" in vars(request.module)):
        yield

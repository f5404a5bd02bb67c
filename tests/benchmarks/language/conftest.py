"""A small corpus instead of the machine's sources."""

import pytest
import torch

from benchmarks.language import corpus, nodes


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(97, 105, (length,), generator=generator, dtype=torch.uint8) for length in (4000, 500, 700)]
    made = corpus.Corpus(*texts, files=("training 00 4000 a.py",), checksum="00")
    monkeypatch.setattr(corpus, "load", lambda: made)
    nodes.task_of.cache_clear()
    yield made
    nodes.task_of.cache_clear()

"""A small corpus instead of the machine's sources."""

import os

import pytest
import torch
import torch.distributed as dist

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


@pytest.fixture
def in_two_processes(borrow, small_corpus):
    """Returns what a program returns on two ranks, which train on the small corpus, too."""

    def on_both(program):
        def run(_):
            if dist.is_initialized():  # by a test before, in borrowed processes
                dist.destroy_process_group()
            dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
            before, corpus.load = corpus.load, lambda: small_corpus
            nodes.task_of.cache_clear()
            try:
                return program()
            finally:
                dist.destroy_process_group()
                corpus.load = before
                nodes.task_of.cache_clear()

        return borrow(run, 2)

    return on_both

"""The loader of nodes with unequal numbers of batches, on threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import on_ranks
from problems import Stream

from lightning_hiercomm.trainer.unequal_data import IdlingLoader


def loaded(loader: Any, check_every: int = 2) -> Any:
    """Return a function of a rank's topology: what it loads in two epochs, negative where it idles."""

    def work(topology: Any) -> list[list[int]]:
        begun = 0
        own = loader(topology.rank)
        idling = IdlingLoader(own, "max_size_cycle", topology, torch.device("cpu"), lambda: begun, lambda: check_every)
        epochs = []
        for _ in range(2):
            begun, yielded = 0, []
            for batch, *_ in iter(idling):
                yielded.append(~batch if idling.is_idle(begun) else batch)
                begun += 1  # noqa: SIM113  # the loader reads it
            epochs.append(yielded)
        assert epochs[0] == epochs[1]
        return epochs[0]

    return work


@pytest.mark.filterwarnings("ignore:ranks of a node")
def test_loader_with_length_ends_with_the_longest_node():
    lengths = (5, 4, 3, 2)
    result = on_ranks(loaded(lambda rank: list(range(lengths[rank]))), ((0, 1), (2, 3)))
    assert result == [[0, 1, 2, 3]] * 2 + [[0, 1, ~1, ~1]] * 2


def test_loader_without_length_ends_at_a_check(caplog):
    lengths = (5, 6, 3, 3)
    result = on_ranks(loaded(lambda rank: Stream(range(lengths[rank]))), ((0, 1), (2, 3)))
    assert result == [[0, 1, 2, 3, 4, ~4], [0, 1, 2, 3, 4, ~5], *[[0, 1, 2, ~2, ~2, ~2]] * 2]
    (message,) = caplog.messages
    assert message.startswith("rank 1 (node 0) has more batches than another rank of its node")


def test_unused_batches_are_named_once():
    with pytest.warns(UserWarning, match=r"node 0 has \[5, 4\] batches on its ranks and uses 4 of each") as warned:
        on_ranks(loaded(lambda rank: list(range(5 - rank))), ((0, 1),))
    assert sum("stay unused" in str(each.message) for each in warned) == 2  # threads are all rank 0 to Lightning

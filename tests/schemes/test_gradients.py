"""The ways of a model's gradients, on threads."""

from __future__ import annotations

import pytest
import torch

from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.schemes.gradients import gradient_path
from lightning_hiercomm.topology import Topology

NODES = [[0, 1], [2, 3, 4]]
ROWS = [[3, 3, 0], [5], [], [0, 1, 5, 5, 5], [3]]  # what each rank looks up of an embedding of six rows


def sparse(rank: int) -> torch.Tensor:
    values = torch.arange(2.0 * len(ROWS[rank])).view(-1, 2) + rank
    return torch.sparse_coo_tensor(
        torch.tensor([ROWS[rank]], dtype=torch.int64), values, (6, 2), check_invariants=False
    )


@pytest.mark.parametrize("way", ["node", "world", "none"])
def test_sparse_gradients_have_the_mean_of_dense_ones_and_no_further_rows(way):
    def body(rank, world):
        meter = Meter()
        topology = Topology(NODES, rank, world.connect(rank, meter), meter)
        path = gradient_path(way, topology, torch.device("cpu"), Wire(), piece_bytes=1024)
        dense = sparse(rank).to_dense().view(-1)
        path.reduce(dense).wait()
        mean = path.reduce_sparse(sparse(rank)).coalesce()
        path.close()
        return dense.view(6, 2), mean

    for rank, (dense, mean) in enumerate(ThreadWorld(5).run(body)):
        torch.testing.assert_close(mean.to_dense(), dense)
        node = next(ranks for ranks in NODES if rank in ranks)
        looked_up = {"node": node, "world": range(5), "none": [rank]}[way]
        assert mean.indices()[0].tolist() == sorted({row for other in looked_up for row in ROWS[other]})


def test_a_sparse_gradient_that_nobody_has_is_empty():
    def body(rank, world):
        meter = Meter()
        topology = Topology([[0, 1]], rank, world.connect(rank, meter), meter)
        return gradient_path("node", topology, torch.device("cpu"), Wire(), 1024).reduce_sparse(sparse(2))

    for mean in ThreadWorld(2).run(body):
        assert mean.shape == (6, 2)
        assert mean.indices().numel() == 0

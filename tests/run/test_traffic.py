"""What plain DDP would have sent."""

from __future__ import annotations

from types import SimpleNamespace

from harness import on_ranks

from lightning_hiercomm.elastic.topology import ElasticTopology
from lightning_hiercomm.run.traffic import ddp_inter_bytes

SCHEMES = [SimpleNamespace(replica=SimpleNamespace(whole_bytes=800.0))]


def test_ddp_sends_a_ring_over_all_ranks_out_of_every_node():
    sent = on_ranks(lambda topology: ddp_inter_bytes(topology, SCHEMES, 5), [[0, 1], [2, 3]])
    assert sent == [5 * 2 * (2 * 3 / 4 * 800)] * 4


def test_elastic_traffic_counts_bytes_sent_by_this_node():
    def work(own):
        topology = ElasticTopology(own)
        topology.reform([2, 2], node=1)
        return ddp_inter_bytes(topology, SCHEMES, 5)

    assert on_ranks(work, [[0, 1]]) == [5 * (2 * 3 / 4 * 800)] * 2

"""The ways of gradients: node, world, nowhere; and what encoding keeps back of them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from harness import on_cpu, place
from harness import on_ranks as on_each
from lightning.pytorch.plugins.precision import MixedPrecision
from problems import Oracle

from lightning_hiercomm.comm.codec import Quantized
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes import AllReduce
from lightning_hiercomm.schemes.gradient_path import InterNodeMean, LocalGradients, NodeMean, WorldMean, gradient_path

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

NODES = [((0,), (1,)), ((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 1), (2,), (3,)), ((0, 1), (2, 3), (4, 5))]
WIRES = [None, "bfloat16", "int8", "int4", "sparse2"]
# relative to the largest number that is encoded; a sum over more than two nodes is encoded twice
HALF_A_SCALE = {None: 1e-6, "bfloat16": 2**-8, "int8": 0.51 / 127, "int4": 0.51 / 7}


def on_ranks(work, nodes, gradients="world", wire=None, weights=None, chunk_bytes=4 * 2**20, parameters=()):
    def body(rank, world):
        meter = Meter()
        topology = Topology(nodes, rank, world.connect(rank, meter), meter, weights)
        path = gradient_path(gradients, topology, place.device, Wire.named(wire), chunk_bytes, parameters)
        try:
            with place.rank():
                return work(path, topology)
        finally:
            path.close()

    return on_cpu(ThreadWorld(sum(map(len, nodes))).run(body))


def gradient_of(rank, numel, round_=0, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * round_ + rank)).to(place.device, dtype)


def weighted_mean(ranks, weights, numel, round_=0):
    weights = torch.tensor([weights[rank] for rank in ranks], dtype=torch.float64)
    values = torch.stack([gradient_of(rank, numel, round_).double().cpu() for rank in ranks])
    return (weights[:, None] * values).sum(0) / weights.sum()


def test_everyone_asks_for_the_way_that_its_scheme_needs():
    def kinds(nodes):
        return [on_ranks(lambda path, _: type(path), nodes, gradients)[0] for gradients in ("node", "world", "none")]

    assert kinds(((0, 1), (2,))) == [NodeMean, WorldMean, LocalGradients]
    assert kinds(((0, 1, 2),)) == [NodeMean, NodeMean, LocalGradients]  # one node is the world


@pytest.mark.parametrize("weights", [None, (1, 2, 3, 4)])
@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1,), (2,), (3,))], ids=str)
def test_the_mean_over_the_node_counts_every_rank_with_its_weight(nodes, weights):
    def work(path, topology):
        bucket = gradient_of(topology.rank, 100)
        path.reduce(bucket).wait()
        assert topology.meter.bytes["inter"] == 0
        return bucket

    for rank, bucket in enumerate(on_ranks(work, nodes, "node", weights=weights)):
        own = next(ranks for ranks in nodes if rank in ranks)
        expected = weighted_mean(own, weights or (1,) * 4, 100)
        torch.testing.assert_close(bucket.double(), expected, rtol=0, atol=1e-6)


def test_gradients_that_are_not_exchanged_keep_their_values():
    def work(path, topology):
        bucket = gradient_of(topology.rank, 100)
        path.reduce(bucket).wait()
        assert torch.equal(bucket, gradient_of(topology.rank, 100))
        assert sum(topology.meter.bytes.values()) == 0

    on_ranks(work, ((0, 1), (2,)), "none", wire="int8")


@pytest.mark.parametrize("wire", HALF_A_SCALE)
@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("chunk_bytes", [2**22, 400], ids=["whole", "chunks"])
def test_gradient_mean_is_equal_on_all_ranks_and_as_exact_as_the_wire(nodes, wire, chunk_bytes):
    world = sum(map(len, nodes))
    weights = [1.0 + rank for rank in range(world)]
    sizes = [1, 5, 1000, 1003]

    def work(path, topology):
        buckets = [gradient_of(topology.rank, size) for size in sizes]
        for handle in [path.reduce(bucket, index) for index, bucket in enumerate(buckets)]:
            handle.wait()
        return buckets

    for buckets in zip(*on_ranks(work, nodes, wire=wire, weights=weights, chunk_bytes=chunk_bytes), strict=True):
        assert all(torch.equal(bucket, buckets[0]) for bucket in buckets)
        numel = buckets[0].numel()
        exact = weighted_mean(range(world), weights, numel)
        largest = sum(
            sum(weights[rank] for rank in ranks) / sum(weights) * weighted_mean(ranks, weights, numel).abs().max()
            for ranks in nodes
        )
        bound = HALF_A_SCALE[wire] * (largest + (buckets[0].abs().max() if len(nodes) > 2 else 0))
        assert (buckets[0].double() - exact).abs().max() <= bound + 1e-6


@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
@pytest.mark.parametrize(
    ("nodes", "waits_on_host", "messages"),
    [
        (((0, 1), (2, 3)), False, 1),
        (((0,), (1,), (2,)), False, {None: 1, "bfloat16": 1, "int8": 2 + 1}),  # to each other node, and an all-gather
        (((0, 1), (2, 3)), True, 10),
    ],
)
def test_a_bucket_is_sent_as_a_whole_between_gpus_unless_the_host_waits(
    nodes, waits_on_host, messages, wire, fake_device
):
    buckets = 3

    def work(topology):
        path = gradient_path("world", topology, place.device, Wire.named(wire), chunk_bytes=400)
        for index in range(buckets):
            path.reduce(gradient_of(topology.rank, 1000), index).wait()
        path.close()
        return topology.meter.messages["inter"]

    expected = messages[wire] if isinstance(messages, dict) else messages
    assert on_each(work, nodes, waits_on_host=waits_on_host) == [buckets * expected] * sum(map(len, nodes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
def test_gradients_of_other_types_cross_nodes_too(dtype, wire):
    def work(path, topology):
        bucket = gradient_of(topology.rank, 300, dtype=dtype)
        path.reduce(bucket).wait()
        return bucket

    buckets = on_ranks(work, ((0, 1), (2, 3)), wire=wire)
    exact = weighted_mean(range(4), (1,) * 4, 300)
    assert all(torch.equal(bucket, buckets[0]) for bucket in buckets)
    assert buckets[0].dtype == dtype
    assert (buckets[0].double() - exact).abs().max() < 0.03


@pytest.mark.parametrize("wire", ["int8", "int4"])
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_the_running_mean_of_a_constant_gradient_tends_to_it(nodes, wire):
    """What has not arrived yet is kept by its sender and by who sums, so it does not grow with the rounds."""
    world, numel, rounds = sum(map(len, nodes)), 700, 48

    def work(path, topology):
        total, errors = torch.zeros(numel, dtype=torch.float64, device=place.device), []
        for n in range(1, rounds + 1):
            bucket = gradient_of(topology.rank, numel)
            path.reduce(bucket).wait()
            total += bucket
            errors.append(total / n)
        return errors

    exact = weighted_mean(range(world), (1,) * world, numel)
    largest = sum(len(r) / world * weighted_mean(r, (1,) * world, numel).abs().max() for r in nodes) + exact.abs().max()
    bound = 1.3 * HALF_A_SCALE[wire] * largest  # values plus what was kept back are larger than values
    errors = on_ranks(work, nodes, wire=wire)[0]
    for n, mean in enumerate(errors, start=1):
        assert (mean - exact).abs().max() <= bound / n + 1e-6, n
    assert (errors[0] - exact).abs().max() > 2 * bound / rounds  # the first alone is not that close


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_the_bytes_between_nodes_are_those_of_the_formula(nodes, wire):
    numel, count = 393_216, len(nodes)  # whole blocks of codes on two, three and four nodes
    fraction = {None: 1.0, "bfloat16": 1 / 2, "int8": 1 / 4, "int4": 1 / 8, "sparse2": 1 / 16}[wire]

    def work(path, topology):
        path.reduce(gradient_of(topology.rank, numel)).wait()
        sent = torch.tensor(topology.meter.bytes["inter"])
        topology.intra.all_reduce(sent).wait()
        return sent.item()

    expected = 2 * (count - 1) / count * 4 * numel * fraction
    for sent in on_ranks(work, nodes, wire=wire):
        assert expected * 0.999 <= sent <= expected * 1.02


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("nodes", [((0,), (1,)), ((0, 1), (2,), (3,))], ids=str)
def test_error_feedback_follows_the_gradient_scale(nodes, resumes):
    """A gradient scaler halves its scale before every step."""
    numel, rounds = 700, 20

    def work(path, topology):
        total = torch.zeros(numel, dtype=torch.float64, device=place.device)
        for n in range(rounds):
            path.set_scale(2.0**-n)
            bucket = gradient_of(topology.rank, numel) * 2.0**-n
            path.reduce(bucket).wait()
            total += bucket.double() * 2.0**n
            if resumes:
                path.load_state_dict(path.state_dict())
        return total / rounds

    exact = weighted_mean(range(sum(map(len, nodes))), (1,) * sum(map(len, nodes)), numel)
    mean = on_ranks(work, nodes, wire="int4")[0]
    # the same as of constant gradients, above
    assert (mean - exact).abs().max() <= 1.3 * HALF_A_SCALE["int4"] * 8 / rounds


@pytest.mark.parametrize("wire", ["int8", "int4", "sparse2"])
def test_a_restored_path_goes_on_bit_by_bit(wire):
    nodes = ((0, 1), (2,), (3,))

    def saving(path, topology):
        for n in range(3):
            for index, size in enumerate((1000, 300)):
                path.reduce(gradient_of(topology.rank, size, n), index).wait()
        state = path.state_dict()
        bucket = gradient_of(topology.rank, 1000, 3)
        path.reduce(bucket).wait()
        return state, bucket

    saved = on_ranks(saving, nodes, wire=wire, chunk_bytes=1600)

    def resuming(path, topology, with_state=True):
        if with_state:
            path.load_state_dict(saved[topology.rank][0])
        bucket = gradient_of(topology.rank, 1000, 3)
        path.reduce(bucket).wait()
        return bucket

    for rank, bucket in enumerate(on_ranks(resuming, nodes, wire=wire, chunk_bytes=1600)):
        assert torch.equal(bucket, saved[rank][1])
    without = on_ranks(lambda *rank: resuming(*rank, with_state=False), nodes, wire=wire, chunk_bytes=1600)
    assert not torch.equal(without[0], saved[0][1])


def test_buckets_of_other_sizes_begin_with_nothing_kept_back():
    def work(path, topology):
        for sizes in ((900, 100), (500, 500), (500, 500)):
            buckets = [gradient_of(topology.rank, size) for size in sizes]
            for index, bucket in enumerate(buckets):
                path.reduce(bucket, index).wait()
        kept = {(bucket, piece): held["sender"].numel() for bucket, piece, held, _ in path.state_dict()["feedback"]}
        assert kept == {(0, 0): 500, (1, 0): 500}
        return buckets

    for first, second in on_ranks(work, ((0,), (1,)), wire="int8"):
        assert torch.equal(first, second)


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("first", [(2, 0), (0, 25)], ids=["other parameters", "other elements"])
@pytest.mark.parametrize("kind", [WorldMean, InterNodeMean])
def test_residuals_stay_with_their_elements(kind, first, resumes):
    """Of two buckets the first has another content of the same size in its second round: some were unfrozen."""
    model = [torch.zeros(50, device=place.device, requires_grad=True) for _ in range(5)]

    def round_of(path, topology, number, place, start):
        buckets = []
        for index, contents in enumerate(([(model[place], start), (model[place + 1], 0)], [(model[4], 0)])):
            path.set_contents(index, contents)
            buckets.append(gradient_of(topology.rank, 100, 10 * number + index))
            path.reduce(buckets[-1], index).wait()
        return buckets

    def on_nodes(work):
        if kind is WorldMean:
            return on_ranks(work, ((0, 1), (2,)), wire="int4", parameters=model)

        def body(topology):
            return work(InterNodeMean(topology, Wire.named("int4"), model), topology)

        return on_each(body, [[0], [1]])

    states = on_nodes(lambda path, topology: (round_of(path, topology, 0, 0, 0), path.state_dict()))

    def second_round(path, topology, contents):
        if resumes:
            path.load_state_dict(states[topology.rank][1])
        else:
            round_of(path, topology, 0, 0, 0)
        return round_of(path, topology, 1, *contents)

    (same, other), (changed, too) = (
        on_nodes(lambda path, topology, contents=contents: second_round(path, topology, contents))[0]
        for contents in ((0, 0), first)
    )
    again, _ = on_nodes(lambda path, topology: round_of(path, topology, 1, *first))[0]
    assert torch.equal(changed, again)
    assert not torch.equal(changed, same)
    assert torch.equal(other, too)


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("kind", [WorldMean, InterNodeMean])
def test_residuals_wait_for_the_turn_of_their_optimizer(kind, resumes):
    """A bucket holds zeros for parameters that another optimizer's turn froze; their received sums are ignored."""
    model = [torch.zeros(50, device=place.device) for _ in range(2)]

    def take_turns(order, path, topology):
        arrived = []
        for turn in order:
            for number, parameter in enumerate(model):
                parameter.requires_grad_(number == turn)
            bucket = torch.zeros(100, device=place.device)
            bucket[50 * turn : 50 * turn + 50] = gradient_of(topology.rank, 50, 20 if turn else len(arrived))
            path.set_contents(0, [(parameter, 0) for parameter in model])
            path.reduce(bucket).wait()
            if turn == 0:
                arrived.append(bucket[:50].clone())
            if resumes:
                path.load_state_dict(path.state_dict())
        return torch.stack(arrived)

    def arrives(*order):
        if kind is WorldMean:
            return on_ranks(partial(take_turns, order), ((0, 1), (2,)), wire="int4", parameters=model)[0]
        wire = Wire.named("int4")
        return on_each(lambda topology: take_turns(order, InterNodeMean(topology, wire, model), topology), [[0], [1]])[
            0
        ]

    assert torch.equal(arrives(0, 1, 0, 1, 0), arrives(0, 0, 0))


def test_a_gradient_that_is_not_finite_is_seen_on_all_ranks():
    def work(path, topology):
        bucket = gradient_of(topology.rank, 1000)
        if topology.rank == 3:
            bucket[300] = float("inf")
        path.reduce(bucket).wait()
        again = gradient_of(topology.rank, 1000)
        path.reduce(again).wait()
        assert again.isfinite().all()
        return bucket

    for bucket in on_ranks(work, ((0, 1), (2, 3)), wire="int4"):
        assert not bucket[300].isfinite()
        assert bucket.isfinite().sum() >= 1000 - Quantized(4).block


UNEQUAL = ((0, 1), (2, 3, 4))
ROWS = [[3, 3, 0], [5], [], [0, 1, 5, 5, 5], [3]]  # what each rank looks up of an embedding of six rows


def test_ddp_buckets_are_averaged_outside_of_autocast():
    class Path(LocalGradients):
        def reduce(self, bucket, index=0):
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().reduce(bucket, index)

    seen = []
    bucket = SimpleNamespace(buffer=lambda: torch.ones(2), index=lambda: 0, is_last=lambda: True)
    with torch.autocast("cpu", torch.bfloat16):
        Path().reduce_bucket(bucket)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False]


def sparse_gradient(rank):
    values = torch.arange(2.0 * len(ROWS[rank])).view(-1, 2) + rank
    indices = torch.tensor([ROWS[rank]], dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, values, (6, 2), check_invariants=False).to(place.device)


@pytest.mark.parametrize("weights", [None, (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("gradients", ["node", "world", "none"])
def test_sparse_gradients_have_the_mean_of_dense_ones_and_no_further_rows(gradients, weights):
    def work(path, topology):
        dense = sparse_gradient(topology.rank).to_dense().view(-1)
        path.reduce(dense).wait()
        return dense.view(6, 2), path.reduce_sparse(sparse_gradient(topology.rank)).coalesce()

    for rank, (dense, mean) in enumerate(on_ranks(work, UNEQUAL, gradients, weights=weights)):
        torch.testing.assert_close(mean.to_dense(), dense)
        node = next(ranks for ranks in UNEQUAL if rank in ranks)
        looked_up = {"node": node, "world": range(5), "none": [rank]}[gradients]
        assert mean.indices()[0].tolist() == sorted({row for other in looked_up for row in ROWS[other]})


@pytest.mark.parametrize("waits_on_host", [False, True])
def test_gpu_waits_for_other_nodes_count_as_inter_node_time(waits_on_host, fake_device):
    def work(topology):
        path = gradient_path("world", topology, place.device, Wire(), 4 * 2**20)
        bucket = gradient_of(topology.rank, 100)
        path.reduce(bucket).future(bucket).wait()
        path.close()
        return topology.meter.seconds

    for seconds in on_each(work, ((0,), (1,)), waits_on_host=waits_on_host):
        assert set(seconds) == {"inter"}


def test_a_sparse_gradient_missing_on_all_ranks_is_empty():
    for mean in on_ranks(lambda path, _: path.reduce_sparse(sparse_gradient(2)), ((0, 1),), "node"):
        assert mean.shape == (6, 2)
        assert mean.indices().numel() == 0


def test_sparse_gradients_of_a_node_cost_its_entries_and_not_the_table():
    table = 1_000_000

    def work(path, topology):
        rows = torch.arange(10) * (1 + topology.rank)
        gradient = torch.sparse_coo_tensor(rows[None], torch.ones(10, 4), (table, 4), check_invariants=False)
        path.reduce_sparse(gradient.to(place.device))
        return topology.meter.bytes["intra"]

    for sent in on_ranks(work, ((0, 1), (2, 3)), "node"):
        assert 0 < sent < 1000


class Growing(Oracle):
    """Reports in which scale the gradients' way has kept something back of each batch."""

    def on_train_batch_end(self, *_):
        self.report.append(self.trainer.strategy._run.gradients.state_dict()["scale"])  # noqa: SLF001


@pytest.mark.pooled
def test_residuals_follow_the_scale_of_the_gradient_scaler(fit):
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1))
    strategy = {"scheme": AllReduce(), "ranks_per_node": 1, "wire_dtype": "int8"}
    reports = fit(Growing(steps=3), strategy, devices=2, plugins=[precision])
    assert [report["report"] for report in reports] == [[1024.0, 2048.0, 4096.0]] * 2

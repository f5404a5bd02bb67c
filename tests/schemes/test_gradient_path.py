"""The ways of gradients: node, world, nowhere; and what encoding keeps back of them."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest
import torch
from harness import TWO_BY_TWO, place
from harness import on_ranks as on_each
from lightning.pytorch.plugins.precision import MixedPrecision
from problems import Oracle

from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.schemes import AllReduce
from lightning_hiercomm.schemes.gradient_path import InterNodeMean, WorldMean, gradient_path
from lightning_hiercomm.schemes.reducers.inter_node_sum import InterNodeSum

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

NODES = [((0,), (1,)), ((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 1), (2,), (3,)), ((0, 1), (2, 3), (4, 5))]
# relative to the largest number that is encoded; a sum over more than two nodes is encoded twice
HALF_A_SCALE = {None: 1e-6, "bfloat16": 2**-8, "int8": 0.51 / 127, "int4": 0.51 / 7}


def on_ranks(work, nodes, gradients="world", wire=None, weights=None, chunk_bytes=4 * 2**20, parameters=()):
    def body(topology):
        path = gradient_path(gradients, topology, place.device, Wire(wire), chunk_bytes, parameters)
        with closing(path):
            return work(path, topology)

    return on_each(body, nodes, weights)


def gradient_of(rank, numel, round_=0, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * round_ + rank)).to(place.device, dtype)


def mean_of(path, bucket, index=0, contents=()):
    """Reduce a bucket, and return it."""
    path.reduce(bucket, index, contents).wait()
    return bucket


def weighted_mean(ranks, numel, weights=None):
    weights = torch.tensor([1.0 if weights is None else weights[rank] for rank in ranks], dtype=torch.float64)
    values = torch.stack([gradient_of(rank, numel).double().cpu() for rank in ranks])
    return (weights[:, None] * values).sum(0) / weights.sum()


def test_an_error_in_one_chunk_reaches_whoever_waits_for_the_bucket(monkeypatch):
    launch, failed = InterNodeSum.launch, set()

    def fails_first(self, *arguments):
        if self not in failed:
            failed.add(self)
            raise MemoryError("for encoding")
        return launch(self, *arguments)

    def work(path, topology):
        with pytest.raises(MemoryError, match="for encoding"):
            mean_of(path, gradient_of(topology.rank, 100))

    monkeypatch.setattr(InterNodeSum, "launch", fails_first)
    on_ranks(work, ((0,), (1,)), wire="int4", chunk_bytes=160)
    assert len(failed) == 2


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
        exact = weighted_mean(range(world), numel, weights)
        largest = sum(
            sum(weights[rank] for rank in ranks) / sum(weights) * weighted_mean(ranks, numel, weights).abs().max()
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
        with closing(gradient_path("world", topology, place.device, Wire(wire), chunk_bytes=400)) as path:
            for index in range(buckets):
                mean_of(path, gradient_of(topology.rank, 1000), index)
        return topology.meter.messages["inter"]

    expected = messages[wire] if isinstance(messages, dict) else messages
    assert on_each(work, nodes, waits_on_host=waits_on_host) == [buckets * expected] * sum(map(len, nodes))


@pytest.mark.parametrize("weights", [None, (1, 2, 3)])
@pytest.mark.parametrize(("wire", "jobs"), [(None, 0), ("bfloat16", 2), ("int8", 2)])
def test_gpus_that_are_nodes_average_float32_as_ddp_does(wire, jobs, weights, fake_device, monkeypatch):
    submitted, submit = [], Background.submit
    monkeypatch.setattr(Background, "submit", lambda self, work: (submitted.append(1), submit(self, work))[1])
    nodes, exact = ((0,), (1,), (2,)), weighted_mean(range(3), 1000, weights)

    def work(path, topology):
        return mean_of(path, gradient_of(topology.rank, 1000)).double().cpu()

    means = on_ranks(work, nodes, wire=wire, weights=weights)
    assert all(torch.allclose(mean, exact, atol=1e-6 if wire is None else 0.1) for mean in means)
    assert len(submitted) == jobs * len(nodes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
def test_gradients_of_other_types_cross_nodes_too(dtype, wire):
    def work(path, topology):
        return mean_of(path, gradient_of(topology.rank, 300, dtype=dtype))

    buckets = on_ranks(work, TWO_BY_TWO, wire=wire)
    exact = weighted_mean(range(4), 300)
    assert all(torch.equal(bucket, buckets[0]) for bucket in buckets)
    assert buckets[0].dtype == dtype
    assert (buckets[0].double() - exact).abs().max() < 0.03


@pytest.mark.parametrize("wire", ["int8", "int4"])
@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("nodes", [((0,), (1,)), ((0, 1), (2,), (3,))], ids=str)
def test_error_feedback_follows_the_gradient_scale(nodes, resumes, wire):
    """A gradient scaler halves its scale before every step; what has not arrived does not grow with the rounds."""

    def work(path, topology):
        means = []
        for n in range(20):
            path.residuals.set_scale(2.0**-n)
            means.append(mean_of(path, gradient_of(topology.rank, 700) * 2.0**-n).double() * 2.0**n)
            if resumes:
                path.load_state_dict(path.state_dict())
        return means[0], sum(means) / len(means)

    exact, bound = weighted_mean(range(sum(map(len, nodes))), 700), 1.3 * HALF_A_SCALE[wire] * 8 / 20
    first, mean = on_ranks(work, nodes, wire=wire)[0]
    assert (mean - exact).abs().max() <= bound
    assert (first - exact).abs().max() > (mean - exact).abs().max()


def test_buckets_of_other_sizes_begin_with_nothing_kept_back():
    def work(path, topology):
        for sizes in ((900, 100), (500, 500), (500, 500)):
            buckets = [mean_of(path, gradient_of(topology.rank, size), index) for index, size in enumerate(sizes)]
        kept = {(bucket, piece): held["sender"].numel() for bucket, piece, held, _ in path.state_dict()["feedback"]}
        assert kept == {(0, 0): 500, (1, 0): 500}
        return buckets

    for first, second in on_ranks(work, ((0,), (1,)), wire="int8"):
        assert torch.equal(first, second)


def on_paths(kind, work, model):
    """Call ``work(path, topology)`` with a path of this kind that encodes gradients of the model as int4."""
    if kind is WorldMean:
        return on_ranks(work, ((0, 1), (2,)), wire="int4", parameters=model)
    return on_each(lambda topology: work(InterNodeMean(topology, Wire("int4"), model), topology), [[0], [1]])


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("first", [(2, 0), (0, 25)], ids=["other parameters", "other elements"])
@pytest.mark.parametrize("kind", [WorldMean, InterNodeMean])
def test_residuals_stay_with_their_elements(kind, first, resumes):
    """Of two buckets the first has another content of the same size in its second round: some were unfrozen."""
    model = [torch.zeros(50, device=place.device, requires_grad=True) for _ in range(5)]

    def round_of(path, topology, number, place, start):
        buckets = []
        for index, contents in enumerate(([(model[place], start), (model[place + 1], 0)], [(model[4], 0)])):
            buckets.append(mean_of(path, gradient_of(topology.rank, 100, 10 * number + index), index, contents))
        return buckets

    on_nodes = partial(on_paths, kind, model=model)
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
            path.reduce(bucket, contents=[(parameter, 0) for parameter in model]).wait()
            if turn == 0:
                arrived.append(bucket[:50].clone())
            if resumes:
                path.load_state_dict(path.state_dict())
        return torch.stack(arrived)

    with_others, alone = (
        on_paths(kind, partial(take_turns, order), model)[0] for order in ((0, 1, 0, 1, 0), (0, 0, 0))
    )
    assert torch.equal(with_others, alone)


UNEQUAL = ((0, 1), (2, 3, 4), (5, 6))
ROWS = [[3, 3, 0], [5], [], [0, 1, 5, 5, 5], [3], [], []]  # what each rank looks up of an embedding of six rows


def sparse_gradient(rank):
    values = torch.arange(2.0 * len(ROWS[rank])).view(-1, 2) + rank
    indices = torch.tensor([ROWS[rank]], dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, values, (6, 2), check_invariants=False).to(place.device)


@pytest.mark.parametrize("weights", [None, (1, 2, 3, 4, 5, 6, 7)])
@pytest.mark.parametrize("gradients", ["node", "world"])
def test_sparse_gradients_have_the_mean_of_dense_ones_and_no_further_rows(gradients, weights):
    def work(path, topology):
        dense = mean_of(path, sparse_gradient(topology.rank).to_dense().view(-1))
        return dense.view(6, 2), path.reduce_sparse(sparse_gradient(topology.rank)).coalesce()

    for rank, (dense, mean) in enumerate(on_ranks(work, UNEQUAL, gradients, weights=weights)):
        torch.testing.assert_close(mean.to_dense(), dense)
        node = next(ranks for ranks in UNEQUAL if rank in ranks)
        looked_up = {"node": node, "world": range(7)}[gradients]
        assert mean.indices()[0].tolist() == sorted({row for other in looked_up for row in ROWS[other]})


@pytest.mark.parametrize("waits_on_host", [False, True])
def test_gpu_waits_for_other_nodes_count_as_inter_node_time(waits_on_host, fake_device):
    def work(topology):
        bucket = gradient_of(topology.rank, 100)
        with closing(gradient_path("world", topology, place.device, Wire(), 4 * 2**20)) as path:
            path.reduce(bucket).future(bucket).wait()
        return topology.meter.seconds

    for seconds in on_each(work, ((0,), (1,)), waits_on_host=waits_on_host):
        assert set(seconds) == {"inter"}


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

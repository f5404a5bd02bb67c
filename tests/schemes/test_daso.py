"""DASO, against the numbers worked by hand from Eq. 1."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from harness import TWO_BY_TWO, attached, needs_a_background_thread, on_nodes, steps

from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes import bucket
from lightning_hiercomm.schemes import DASO, Epochs, Plateau

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

on_four_ranks = partial(on_nodes, nodes=TWO_BY_TWO, epochs=10)
B4_S1 = [
    (0.5, 3.5),
    (1.375, 3.625),
    (1.1875, 5.3125),
    (1.09375, 6.15625),
    (1.046875, 6.578125),
    (2.41796875, 5.30078125),
    (1.708984375, 6.150390625),
]
B4_S2 = [
    (0.5, 3.5),
    (0.75, 5.25),
    (1.25, 4.75),
    (1.125, 5.875),
    (1.0625, 6.4375),
    (1.03125, 6.71875),
    (185 / 96, 559 / 96),
]


def cycling(sync_every=4, staleness=1, **arguments):
    """A DASO that cycles from the first step to the last."""
    return lambda: DASO(sync_every, staleness, warmup=0, cooldown=0, **arguments)


def single(number):
    """The number as float32 has it."""
    return torch.tensor(number, dtype=torch.float32).item()


@pytest.mark.parametrize("reducer", ["leader", "sharded"])
@pytest.mark.parametrize(("staleness", "table", "mean"), [(1, B4_S1, 3.96484375), (2, B4_S2, 3.9375)])
def test_a_cycling_epoch_follows_the_table_to_the_digit(run_oracle, reducer, staleness, table, mean):
    traces = run_oracle(cycling(4, staleness, reducer=reducer))
    for rank, trace in enumerate(traces):
        assert trace.after_step[:7] == [single(pair[rank // 2]) for pair in table]
        assert trace.after_epoch == [mean]
        assert trace.finished == mean


def test_the_ranks_of_a_node_carry_the_exchanges_in_turn(run_oracle):
    # 12 steps: three exchanges and the epoch's mean, two for each rank; 16 steps: one more, the first rank's turn
    less, more = ([t.meter["inter_bytes"] for t in run_oracle(cycling(), steps_per_epoch=k)] for k in (12, 16))
    preflight = 3 * 8  # bytes, in every inter-node group and at every exchange
    parameters = 2 * 4  # one float and its padding to the two ranks of a node
    assert less == [4 * preflight + 2 * parameters + preflight] * 4
    assert [b - a - preflight for a, b in zip(less, more, strict=True)] == [parameters, 0, parameters, 0]


def test_a_sharded_exchange_is_carried_by_all_ranks_alike(run_oracle):
    sent = [trace.meter["inter_bytes"] for trace in run_oracle(cycling(reducer="sharded"), steps_per_epoch=12)]
    preflight = 3 * 8  # bytes, at every exchange and at the end
    assert sent == [4 * (preflight + 4) + preflight] * 4


def test_nothing_waits_between_a_send_and_its_merge():
    needs_a_background_thread()
    # node 1 does not even send before node 0 has sent and taken two steps more: waiting would be a deadlock
    node_0_went_on = threading.Barrier(4)

    def work(rank):
        if rank.node == 1:
            node_0_went_on.wait(timeout=10)
        for _ in range(3):
            rank.train()
        if rank.node == 0:
            node_0_went_on.wait(timeout=10)
        rank.train()
        rank.scheme.finish()

    on_four_ranks(work, cycling(4, 3)())


@pytest.mark.parametrize("merge", ["eq1", "delta"])
def test_bits_are_the_same_however_small_the_parts_are_that_are_merged(monkeypatch, merge):
    def trace(bytes_in_cache):
        monkeypatch.setattr(bucket, "CACHE_SIZED", bytes_in_cache)
        shapes = {"a": (7, 3), "b": (2,), "c": (5, 4)}
        runs = on_four_ranks(steps(9), cycling(2, 1, merge=merge)(), shapes=shapes, targets=None)
        return [run.trace for run in runs]

    assert trace(16) == trace(2**20)


def test_plain_checkpoint_resumes_from_averaged_parameters():
    original = cycling(8, 2, plateau=Plateau(patience=0))()

    def work(rank):
        scheme = rank.scheme
        for epoch in range(2):
            scheme.begin_epoch(epoch)
            steps(3)(rank)
            scheme.end_epoch(torch.tensor(1.0))
        scheme.begin_epoch(2)
        rank.train()
        state = scheme.state_dict(shared=True)
        scheme.synchronize()
        averaged = scheme.replica.snapshot()

        with attached(rank.topology, original, epochs=10) as again:
            resumed = again.scheme
            resumed.replica.restore(averaged)
            resumed.load_state_dict({**state, "unsynchronized_steps": 0})
            assert (resumed.period, resumed.staleness) == (4, 1)
            assert resumed.state.exchanges_started == scheme.state.exchanges_started
            local = again.values.item()
            again.train()
            # the exchange that was in flight is gone: this was a local step
            assert again.values.item() == (local + (1.0, 1.0, 7.0, 7.0)[rank.rank]) / 2
        return averaged[0].item()

    assert len(set(on_four_ranks(work, original))) == 1


def test_saving_a_plain_checkpoint_does_not_wait_for_other_nodes():
    needs_a_background_thread()
    # after an exception the others may never answer
    saved = threading.Barrier(4)

    def work(rank):
        if rank.node == 1:
            saved.wait(timeout=10)
        rank.train()
        rank.scheme.state_dict()
        if rank.node == 0:
            saved.wait(timeout=10)
        rank.scheme.finish()

    on_four_ranks(work, cycling()())


def test_buffers_are_averaged_only_in_blocking_syncs():
    def work(rank):
        buffer = rank.scheme.replica.buffers[0].fill_(rank.rank)
        steps(3)(rank)
        alone = buffer.item()
        rank.scheme.end_epoch(torch.tensor(1.0))
        return alone, buffer.item()

    assert on_four_ranks(work, cycling()(), buffer=torch.zeros(1)) == [(rank, 1.5) for rank in range(4)]


@pytest.mark.parametrize("compressed_phases", ["all", "blocking"])
def test_how_far_nodes_are_apart_is_seen_in_every_phase(compressed_phases):
    def work(rank):
        seen = []
        for epoch in range(3):
            rank.scheme.begin_epoch(epoch)
            for step in range(6):
                rank.train(float(rank.rank + 1) * (epoch + 1), last=step == 5)
            rank.scheme.state.settle()
            seen.append(rank.scheme.scalars()["disagreement"])
            rank.scheme.end_epoch(torch.tensor(1.0))
        return seen

    scheme = DASO(2, 1, warmup=Epochs(1), cooldown=0, plateau=None, compressed_phases=compressed_phases)
    assert len(set(on_four_ranks(work, scheme, wire="bfloat16", epochs=3)[0])) == 3


@pytest.mark.parametrize("reducer", ["leader", "sharded"])
def test_only_the_documented_phases_send_fewer_bytes(run_oracle, reducer):
    def sent(compressed_phases, **phases):
        traces = run_oracle(
            lambda: DASO(2, 1, **phases, reducer=reducer, compressed_phases=compressed_phases),
            epochs=2,
            losses=[1.0, 1.0],
            wire=Wire(torch.bfloat16),
        )
        return sum(trace.meter["inter_bytes"] for trace in traces)

    cycling_only = {"warmup": 0, "cooldown": 0}
    blocking_only = {"warmup": Epochs(2), "cooldown": 0}
    assert sent("blocking", **cycling_only) > sent("all", **cycling_only)
    assert sent("blocking", **blocking_only) == sent("all", **blocking_only)


def test_an_overdue_exchange_is_merged_before_the_next_one_starts():
    """Epochs have no end in the trial of a learning rate finder."""

    def work(rank):
        for step in range(9):
            rank.train(last=step == 7)
        return rank.scheme.state.pending.exchange.started, rank.scheme.state.synchronizations

    assert on_nodes(work, cycling(2)()) == [(9, 4)] * 2

"""DASO, against the numbers worked by hand from Eq. 1."""

from __future__ import annotations

import logging
import threading
from functools import partial

import pytest
import torch
from harness import (
    TWO_BY_TWO,
    attached,
    needs_a_background_thread,
    on_nodes,
    on_ranks,
    reloaded,
    steps,
)
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from problems import Oracle
from torch.utils.data import DataLoader

from lightning_hiercomm.comm.base import CommunicationError
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes import bucket
from lightning_hiercomm.schemes import DASO, AllReduce, Epochs, PeriodicAveraging, Plateau
from lightning_hiercomm.schemes.daso import RunningDASO

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


ON_VAL_LOSS = Plateau(patience=0, monitor="val_loss")


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


@pytest.mark.parametrize("reducer", ["leader", "sharded"])
def test_blocking_phases_equal_averaging_at_every_step(run_oracle, reducer):
    traces = run_oracle(lambda: DASO(warmup=Epochs(1), reducer=reducer))
    assert traces[0].after_step[:4] == [2, 3, 3.5, 3.75]
    assert [t.after_step for t in traces] == [t.after_step for t in run_oracle(lambda: PeriodicAveraging(1))]


def test_a_merge_and_a_send_on_one_batch_merge_first(run_oracle):
    traces = run_oracle(cycling(1, 1), steps_per_epoch=5)
    assert list(zip(traces[0].after_step, traces[2].after_step, strict=True))[:4] == [
        (0.5, 3.5),
        (1.375, 3.625),
        (1.84375, 3.90625),
        (2.1484375, 4.1640625),
    ]


def test_pending_exchange_at_epoch_end_is_replaced_by_a_mean(run_oracle):
    # two batches: sent after the first, due after the second, which is the last; the next epoch starts from the mean
    traces = run_oracle(cycling(2, 1), steps_per_epoch=2, epochs=2)
    for trace, local in zip(traces, (0.75, 0.75, 5.25, 5.25), strict=True):
        assert trace.after_step[1] == local
        assert trace.after_epoch == [3.0, 3.75]


def test_delta_merge_keeps_all_local_progress_and_the_mean(run_oracle):
    traces = run_oracle(cycling(merge="delta"))
    assert (traces[0].after_step[1], traces[2].after_step[1]) == (2.25, 3.75)
    means = [sum(values) / 4 for values in zip(*(trace.after_step for trace in traces), strict=True)]
    assert means == [4 - 4 / 2**step for step in range(1, 9)]


def test_rank_weights_reach_blocking_phases_and_merges(run_oracle):
    blocking = run_oracle(partial(DASO, warmup=Epochs(1)), weights=(1, 3, 2, 2), steps_per_epoch=3)
    assert blocking[0].after_step == [2.125, 3.1875, 3.71875]
    # node targets 1 and 8, node weights 1/4 and 3/4: sent 0.5 and 4, weighted mean 3.125, local 0.75 and 6
    traces = run_oracle(cycling(2, 1), weights=(1, 1, 2, 4), steps_per_epoch=4)
    assert (traces[0].after_step[1], traces[2].after_step[1]) == ((0.75 + 3.125) / 2, (6 + 3.125) / 2)


def test_one_node_trains_as_all_reduce_does(run_oracle):
    arguments = {"nodes": [[0, 1, 2, 3]], "momentum": 0.9, "epochs": 2}
    daso = run_oracle(cycling(), **arguments)
    assert [t.after_step for t in daso] == [t.after_step for t in run_oracle(AllReduce, **arguments)]


# ---- who carries it, and when ------------------------------------------------------------------------------------


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
        scheme = rank.scheme
        scheme.begin_epoch(0, dict)
        if rank.node == 1:
            node_0_went_on.wait(timeout=10)
        for _ in range(3):
            rank.train()
        if rank.node == 0:
            node_0_went_on.wait(timeout=10)
        rank.train()
        scheme.finish()

    on_four_ranks(work, cycling(4, 3)())


@pytest.mark.parametrize("nodes", [[[0, 1], [2, 3], [4, 5]], [[0, 1, 2], [3], [4, 5]], [[0, 3], [1, 4, 5, 2]]])
@pytest.mark.parametrize("merge", ["eq1", "delta"])
@pytest.mark.parametrize("wire", [None, Wire(torch.bfloat16)])
def test_both_ways_to_exchange_give_the_same_numbers(run_oracle, nodes, merge, wire):
    # a warm-up epoch, two that cycle and a cool-down, on nodes of any size
    traces = [
        run_oracle(
            lambda reducer=reducer: DASO(3, 2, Epochs(1), Epochs(1), merge=merge, reducer=reducer),
            nodes=nodes,
            targets=(0.0, 2.0, 4.0, 10.0, -3.0, 1.5),
            momentum=0.9,
            learning_rate=0.1,
            epochs=4,
            losses=[1.0] * 4,
            wire=wire,
        )
        for reducer in ("leader", "sharded")
    ]
    for leader, sharded in zip(*traces, strict=True):
        assert leader.after_step == sharded.after_step
        assert leader.finished == sharded.finished == traces[0][0].finished


@pytest.mark.parametrize("merge", ["eq1", "delta"])
def test_bits_are_the_same_however_small_the_parts_are_that_are_merged(monkeypatch, merge):
    def trace(bytes_in_cache):
        monkeypatch.setattr(bucket, "CACHE_SIZED", bytes_in_cache)
        shapes = {"a": (7, 3), "b": (2,), "c": (5, 4)}
        runs = on_four_ranks(steps(9), cycling(2, 1, merge=merge)(), shapes=shapes, targets=None)
        return [run.trace for run in runs]

    assert trace(16) == trace(2**20)


@pytest.mark.parametrize("merge", ["eq1", "delta"])
@pytest.mark.parametrize(("sync_every", "staleness"), [(1, 1), (3, 3), (5, 2), (7, 4), (30, 1)])
def test_two_epochs_on_unequal_nodes_follow_a_plain_simulation(run_oracle, sync_every, staleness, merge):
    targets, weights = (1.0, 5.0, 10.0), (0.25, 0.25, 0.5)  # of the nodes {0}, {1}, {2, 3}
    x, expected = [0.0] * 3, []
    for _ in range(2):
        sent = {}
        for t in range(12):
            x = [(value + target) / 2 for value, target in zip(x, targets, strict=True)]
            if t == 11:
                expected.append(list(x))
                x = [sum(w * v for w, v in zip(weights, x, strict=True))] * 3
                break
            if t - staleness in sent:
                old = sent[t - staleness]
                mean = sum(w * v for w, v in zip(weights, old, strict=True))
                if merge == "eq1":
                    x = [(2 * staleness * v + 3 * mean) / (2 * staleness + 3) for v in x]
                else:
                    x = [v + mean - own for v, own in zip(x, old, strict=True)]
            if t % sync_every == 0:
                sent[t] = list(x)
            expected.append(list(x))
    traces = run_oracle(
        cycling(sync_every, staleness, merge=merge),
        nodes=[[0], [1], [2, 3]],
        targets=(1.0, 5.0, 8.0, 12.0),
        epochs=2,
        steps_per_epoch=12,
        losses=[2.0, 1.0],
        dtype=torch.float64,
    )
    for trace, node in zip(traces, (0, 1, 2, 2), strict=True):
        assert trace.after_step == pytest.approx([values[node] for values in expected], rel=1e-12)
        assert trace.finished == pytest.approx(x[0], rel=1e-12)


# ---- phases ------------------------------------------------------------------------------------------------------


def schedule(run_oracle, scheme, losses, epochs):
    """(phase, sync_every, staleness) as they acted in each epoch."""
    seen = []

    class Recorded(DASO):
        def build(self, context):
            return Recording(self, context)

    class Recording(RunningDASO):
        def end_epoch(self, loss):
            if self.topology.rank == 0:
                scalars = self.scalars()
                seen.append((self.phase, int(scalars["sync_every"]), int(scalars["staleness"])))
            super().end_epoch(loss)

    run_oracle(lambda: Recorded(**scheme), epochs=epochs, steps_per_epoch=9, losses=losses)
    return seen


def test_phases_and_halving_follow_a_scripted_loss_exactly(run_oracle):
    losses = [9.0, 9.0, 8.0, 8.0, 8.0, 7.7, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0, 1.0, 1.0]
    assert schedule(
        run_oracle, {"sync_every": 8, "staleness": 2, "warmup": Epochs(2), "cooldown": Epochs(2)}, losses, 18
    ) == [
        ("warm-up", 1, 0),
        ("warm-up", 1, 0),
        ("cycling", 8, 2),  # 8.0: the best, warm-up was not judged
        ("cycling", 8, 2),
        ("cycling", 8, 2),
        ("cycling", 8, 2),  # 7.7 is the third that is not 5 % below 8.0
        ("cycling", 4, 1),  # 7.0: better
        ("cycling", 4, 1),
        ("cycling", 4, 1),
        ("cycling", 4, 1),
        ("cycling", 2, 1),
        ("cycling", 2, 1),
        ("cycling", 2, 1),
        ("cycling", 1, 1),
        ("cycling", 1, 1),
        ("cycling", 1, 1),
        ("cool-down", 1, 0),
        ("cool-down", 1, 0),
    ]


def test_b_and_s_return_to_their_first_values_from_one(run_oracle):
    scheme = {"sync_every": 4, "staleness": 2, "warmup": 0, "cooldown": Epochs(1)}
    scheme["plateau"] = Plateau(patience=0)
    assert [pair[1:] for pair in schedule(run_oracle, scheme, [1.0] * 9, 9)] == [
        (4, 2),
        (4, 2),
        (2, 1),
        (1, 1),
        (4, 2),
        (2, 1),
        (1, 1),
        (4, 2),
        (1, 0),
    ]


def test_the_loss_is_judged_by_its_mean_over_all_ranks():
    def work(rank):
        scheme = rank.scheme
        seen = []
        # the mean falls 4, 3, 2 and then stays, whatever single ranks see
        for epoch, losses in enumerate([(4, 4, 4, 4), (0, 9, 1, 2), (0, 0, 8, 0), (8, 0, 0, 0), (1, 1, 1, 1)]):
            scheme.begin_epoch(epoch, dict)
            rank.train(last=True)
            scheme.end_epoch(torch.tensor(float(losses[rank.rank])))
            seen.append(scheme.period)
        scheme.finish()
        return seen

    assert on_four_ranks(work, cycling(4, 1, plateau=Plateau(patience=0))()) == [[4, 4, 4, 2, 2]] * 4


def test_a_monitored_metric_is_judged_when_the_next_epoch_begins():
    def work(rank):
        scheme = rank.scheme
        assert not scheme.config.watches_loss
        seen = []
        for epoch in range(4):
            metrics = {"val_loss": torch.tensor(1.0 + rank.rank)} if epoch else {}
            scheme.begin_epoch(epoch, lambda metrics=metrics: metrics)
            seen.append(scheme.period)
            rank.train(last=True)
            scheme.end_epoch(None)
        with pytest.raises(ValueError, match=r"monitor='val_loss' was not logged in epoch 3; logged: train_loss"):
            scheme.begin_epoch(4, lambda: {"train_loss": torch.tensor(1.0)})
        return seen

    assert on_four_ranks(work, cycling(4, 1, plateau=ON_VAL_LOSS)()) == [[4, 4, 2, 1]] * 4


def test_resumed_epoch_is_judged_by_the_saved_metric():
    scheme = cycling(4, 1, plateau=ON_VAL_LOSS)()

    def work(rank):
        logged = {}
        for epoch in range(2):
            rank.scheme.begin_epoch(epoch, lambda: logged)
            rank.train(last=True)
            rank.scheme.end_epoch(None)
            logged.setdefault("val_loss", torch.tensor(1.0))
        before_validation = reloaded(rank.scheme.state_dict(shared=True))
        logged["val_loss"] = torch.tensor(1.0)
        after_validation = reloaded(rank.scheme.state_dict(shared=True))
        periods = []
        for state in (before_validation, after_validation):
            with attached(rank.topology, scheme, epochs=10, begins_epoch=False) as again:
                again.scheme.load_state_dict(state)
                again.scheme.begin_epoch(2, dict)
                periods.append(again.scheme.period)
        return periods

    assert on_four_ranks(work, scheme) == [[4, 2]] * 4


def test_a_monitored_metric_is_judged_once_where_not_every_epoch_logs_it():
    def work(rank):
        scheme, logged, seen = rank.scheme, {}, []
        for epoch in range(7):
            scheme.begin_epoch(epoch, lambda: logged)
            seen.append(scheme.period)
            rank.train(last=True)
            scheme.end_epoch(None)
            if epoch % 2 == 0:  # Lightning keeps it until the next one
                logged["val_loss"] = torch.tensor(2.0 ** -min(epoch, 4))
        return seen

    assert on_four_ranks(work, cycling(4, 1, plateau=ON_VAL_LOSS)()) == [[4, 4, 4, 4, 4, 4, 4]] * 4


def test_epochs_without_a_loss_change_nothing_and_warn_once(caplog):
    def work(rank):
        scheme = rank.scheme
        for epoch in range(3):
            scheme.begin_epoch(epoch, dict)
            rank.train(last=True)
            scheme.end_epoch(None)
        scheme.finish()
        return scheme.period

    assert on_four_ranks(work, cycling(4, 1, plateau=Plateau(patience=0))()) == [4] * 4
    assert [r.message.count("had no training loss") for r in caplog.records if r.levelno == logging.WARNING] == [1]


@pytest.mark.parametrize("scheme", [DASO(2, 1, warmup=3, cooldown=2), DASO(2, 1, warmup=0.3, cooldown=0.2)])
def test_phases_in_steps_begin_and_end_inside_epochs(scheme):
    def work(rank):
        scheme = rank.scheme
        phases = []
        for epoch in range(2):
            scheme.begin_epoch(epoch, dict)
            for _ in range(5):
                rank.train()
                phases.append(scheme.phase)
        scheme.finish()
        return phases

    expected = ["warm-up"] * 3 + ["cycling"] * 5 + ["cool-down"] * 2
    assert on_four_ranks(work, scheme, epochs=None, steps=10) == [expected] * 4


def test_phase_changes_are_announced_once_on_rank_zero(run_oracle, caplog):
    caplog.set_level(logging.INFO)
    run_oracle(lambda: DASO(4, 1, Epochs(1), Epochs(1)), epochs=4, losses=[1.0] * 4)
    assert [record.message.split(":")[1].strip() for record in caplog.records] == [
        "warm-up from epoch 0, step 0",
        "cycling from epoch 1, step 8",
        "cool-down from epoch 3, step 24",
    ]


@pytest.mark.parametrize(
    ("arguments", "run", "message"),
    [
        (
            {"cooldown": Epochs(4)},
            (None, None),
            r"cooldown=Epochs\(epochs=4\) needs to know when the run ends: .*max_epochs",
        ),
        ({"cooldown": Epochs(4)}, (None, 100), r"cooldown=Epochs\(epochs=4\) .*max_epochs"),
        ({"cooldown": 10}, (5, None), r"cooldown=10 .*max_steps"),
        ({"cooldown": 0.1}, (5, None), r"cooldown=0\.1 .*max_steps"),
        ({"warmup": 0.1, "cooldown": 0}, (5, None), r"warmup=0\.1 is a fraction of the run, .*max_steps"),
    ],
)
def test_a_length_that_needs_an_unknown_end_is_refused(arguments, run, message):
    def work(topology):
        epochs, steps = run
        training = attached(topology, DASO(**arguments), epochs=epochs, steps=steps)
        with pytest.raises(ValueError, match=message), training:
            pass

    on_ranks(work)


FOUR_AND_FOUR = {"warmup": Epochs(4), "cooldown": Epochs(4)}


@pytest.mark.parametrize(
    ("arguments", "run", "said"),
    [
        (FOUR_AND_FOUR, (8, None), "warmup=Epochs(epochs=4) and cooldown=Epochs(epochs=4) leave no step"),
        (FOUR_AND_FOUR, (9, None), None),
        ({"warmup": Epochs(4), "cooldown": 0}, (4, None), "warmup=Epochs(epochs=4) and cooldown=0"),
        ({"warmup": Epochs(4), "cooldown": 0}, (None, None), None),
        ({"warmup": 50, "cooldown": 50}, (None, 100), "warmup=50 and cooldown=50"),
        ({"warmup": 50, "cooldown": 49}, (None, 100), None),
        ({"warmup": 60, "cooldown": Epochs(4)}, (10, 100), "warmup=60 and cooldown=Epochs(epochs=4)"),
        ({"warmup": Epochs(6)}, (8, None), "warmup=Epochs(epochs=6) leave no step"),
        *(({}, run, None) for run in [(1, None), (2, 20), (4, None), (8, None), (8, 80), (None, 100), (None, None)]),
    ],
)
def test_phases_without_cycling_steps_warn_once(caplog, arguments, run, said):
    epochs, steps = run
    on_four_ranks(lambda rank: None, DASO(**arguments), epochs=epochs, steps=steps, begins_epoch=False)
    warned = [r.message for r in caplog.records if "every step will average all nodes" in r.message]
    assert len(warned) == (said is not None)
    assert all(said in message for message in warned)


@pytest.mark.parametrize(
    ("epochs", "waiting"),
    [(1, 0), (3, 0), (4, 1), (7, 1), (8, 2), (12, 3), (15, 3), (16, 4), (17, 4), (40, 4), (None, 4)],
)
def test_warm_up_and_cool_down_default_to_four_epochs_or_a_quarter(epochs, waiting):
    begun = epochs or 6  # without an end there is no cool-down

    def work(rank):
        phases = []
        for epoch in range(begun):
            rank.scheme.begin_epoch(epoch, dict)
            phases.append(rank.scheme.phase)
        return phases

    cool_down = waiting if epochs else 0
    expected = ["warm-up"] * waiting + ["cycling"] * (begun - waiting - cool_down) + ["cool-down"] * cool_down
    (phases, *_) = on_four_ranks(work, DASO(), epochs=epochs, begins_epoch=False)
    assert phases == expected


@pytest.mark.parametrize("epochs", [None, 1, 3])
def test_short_runs_take_a_quarter_of_the_steps(epochs):
    def work(rank):
        phases = []
        for step in range(13):
            rank.train(last=step == 12)
            phases.append(rank.scheme.phase)
        return phases

    (phases, *_) = on_four_ranks(work, DASO(), epochs=epochs, steps=13)
    assert phases == ["warm-up"] * 3 + ["cycling"] * 7 + ["cool-down"] * 3


@pytest.mark.parametrize("epochs", [4, 7])
def test_quarter_of_four_epochs_is_one_epoch(epochs):
    def work(rank):
        for _ in range(12):
            rank.train()
        before = rank.scheme.phase
        rank.scheme.begin_epoch(1, dict)
        return before, rank.scheme.phase

    assert on_four_ranks(work, DASO(), epochs=epochs, steps=13) == [("warm-up", "cycling")] * 4


# ---- synchronization, state --------------------------------------------------------------------------------------


def test_averaging_in_mid_cycle_leaves_training_unchanged():
    def work(rank, looks):
        trace, averaged = [], []
        for _ in range(7):
            rank.train()
            trace.append(rank.values.item())
            if looks:
                averaged.append(rank.averaged().item())
        rank.scheme.end_epoch(torch.tensor(1.0))
        rank.scheme.finish()
        return [*trace, rank.values.item()], averaged

    plain = on_four_ranks(lambda rank: work(rank, False)[0], cycling()())
    looked = on_four_ranks(lambda rank: work(rank, True), cycling()())
    assert [trace for trace, _ in looked] == plain
    means = [sum(values) / 4 for values in zip(*plain, strict=True)][:7]
    assert [averaged for _, averaged in looked] == [means] * 4


def test_plain_checkpoint_resumes_from_averaged_parameters():
    original = cycling(8, 2, plateau=Plateau(patience=0))()

    def work(rank):
        scheme = rank.scheme
        for epoch in range(2):
            scheme.begin_epoch(epoch, dict)
            for _ in range(3):
                rank.train()
            scheme.end_epoch(torch.tensor(1.0))
        scheme.begin_epoch(2, dict)
        rank.train()
        state = scheme.state_dict(shared=True)
        scheme.synchronize()
        averaged = scheme.replica.snapshot()

        with attached(rank.topology, original, epochs=10) as again:
            resumed = again.scheme
            resumed.replica.restore(averaged)
            resumed.load_state_dict({**state, "unsynchronized_steps": 0})
            assert (resumed.period, resumed.staleness, resumed.state.exchanges_started) == (
                4,
                1,
                scheme.state.exchanges_started,
            )
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
        scheme = rank.scheme
        scheme.begin_epoch(0, dict)
        if rank.node == 1:
            saved.wait(timeout=10)
        rank.train()
        scheme.state_dict()
        if rank.node == 0:
            saved.wait(timeout=10)
        scheme.finish()

    on_four_ranks(work, cycling()())


def test_a_node_that_takes_another_number_of_steps_is_reported():
    def work(rank):
        scheme = rank.scheme
        scheme.begin_epoch(0, dict)
        for _ in range(2 if rank.node == 0 else 5):
            rank.train()
        scheme.end_epoch(torch.tensor(1.0))

    with pytest.raises(CommunicationError, match="others after 2 to 5"):
        on_four_ranks(work, cycling()())


def test_buffers_are_averaged_only_in_blocking_syncs():
    def work(rank):
        scheme = rank.scheme
        buffer = scheme.replica.buffers[0].fill_(rank.rank)
        scheme.begin_epoch(0, dict)
        for _ in range(3):
            rank.train()
        alone = buffer.item()
        scheme.end_epoch(torch.tensor(1.0))
        return alone, buffer.item()

    assert on_four_ranks(work, cycling()(), buffer=torch.zeros(1)) == [(rank, 1.5) for rank in range(4)]


@pytest.mark.parametrize("compressed_phases", ["all", "blocking"])
def test_how_far_nodes_are_apart_is_seen_in_every_phase(compressed_phases):
    def work(rank):
        seen = []
        for epoch in range(3):
            rank.scheme.begin_epoch(epoch, dict)
            for step in range(6):
                rank.train(float(rank.rank + 1) * (epoch + 1), last=step == 5)
            rank.scheme.state.settle()
            seen.append(rank.scheme.scalars()["disagreement"])
            rank.scheme.end_epoch(torch.tensor(1.0))
        return seen

    scheme = DASO(2, 1, warmup=Epochs(1), cooldown=0, plateau=None, compressed_phases=compressed_phases)
    assert len(set(on_four_ranks(work, scheme, wire="bfloat16", epochs=3)[0])) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sync_every": 0}, "sync_every=0"),
        ({"sync_every": 2, "staleness": 3}, "staleness=3 must be from 0 to sync_every=2"),
        ({"staleness": -1}, "staleness=-1"),
        ({"warmup": -1}, "warmup=-1"),
        ({"cooldown": 1.5}, "cooldown=1.5"),
        ({"merge": "mean"}, "merge='mean'"),
        ({"reducer": "split"}, "reducer='split'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        DASO(**arguments)


# ---- four real processes -----------------------------------------------------------------------------------------


class Watched(Oracle):
    """``report`` is x, and B as it acts, after each of 8 batches; validation logs a loss that does not fall."""

    def __init__(self, learning_rate: float = 0.5) -> None:
        super().__init__(8, learning_rate=learning_rate)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0 + self.global_rank)

    def on_train_batch_end(self, *_):
        self.report.append((self.x.item(), self.trainer.strategy.schemes[0].period))

    def val_dataloader(self):
        return DataLoader(torch.ones(4, 1))


@pytest.mark.parametrize("monitor", [None, "val_loss"])
@pytest.mark.pooled
def test_a_loss_that_stays_halves_b_and_returns_it_in_a_real_run(fit, monitor):
    # nothing is learnt at learning rate 0; every epoch after the first cycling one is a plateau
    scheme = DASO(4, 1, warmup=Epochs(1), cooldown=Epochs(1), plateau=Plateau(0, monitor=monitor))
    reports = fit(Watched(learning_rate=0.0), {"scheme": scheme}, max_epochs=7, limit_train_batches=2)
    for report in reports:
        assert [sync_every for _, sync_every in report["report"][::2]] == [4, 4, 4, 2, 1, 4, 2]


@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.pooled
def test_a_run_that_goes_on_from_a_file_of_a_validation_judges_its_epoch(fit, tmp_path, replicas):
    save = ModelCheckpoint(tmp_path / "files", "{epoch}", save_top_k=-1, save_on_train_epoch_end=False)
    strategy = {"scheme": cycling(4, 1, plateau=ON_VAL_LOSS)(), "checkpoint_replicas": replicas}
    arguments = {"limit_train_batches": 1, "max_epochs": 4, "devices": 2, "callbacks": [save]}
    arguments["enable_checkpointing"] = True
    strategy["ranks_per_node"] = 1
    whole = fit(Watched(learning_rate=0.0), strategy, **arguments)[0]["report"]
    assert [period for _, period in whole] == [4, 4, 2, 1]
    path = {"ckpt_path": tmp_path / "files" / "epoch=1.ckpt"}
    resumed = fit(Watched(learning_rate=0.0), strategy, fit_arguments=path, **arguments)[0]["report"]
    assert [period for _, period in resumed] == [2, 1]


@pytest.mark.pooled
def test_plain_checkpoint_during_an_exchange_holds_the_mean(fit, tmp_path):
    # after batch 4 group 1 has just sent; the table says 1.046875 / 6.578125
    save = ModelCheckpoint(tmp_path, filename="in-flight", every_n_train_steps=5)
    arguments = {"enable_checkpointing": True, "limit_val_batches": 0}
    reports = fit(Watched(), {"scheme": cycling()()}, callbacks=[save], **arguments)
    for rank, report in enumerate(reports):
        assert [x for x, _ in report["report"]] == [pair[rank // 2] for pair in B4_S1] + [3.96484375]
    path = tmp_path / "in-flight.ckpt"
    mean = (1.046875 + 6.578125) / 2
    assert torch.load(path, weights_only=True)["state_dict"]["x"].item() == mean
    resumed = fit(Watched(), {"scheme": cycling()()}, fit_arguments={"ckpt_path": path}, **arguments)
    for rank, report in enumerate(resumed):
        target, values = (1.0, 7.0)[rank // 2], [x for x, _ in report["report"]]
        # the exchange is gone: local steps to the end of the epoch, which has 8 batches
        assert values[:2] == [(mean + target) / 2, ((mean + target) / 2 + target) / 2]
        assert values[2:] == [4 + (mean - 4) / 8]


class Phases(Watched):
    def on_train_batch_end(self, *_):
        self.report.append(self.trainer.strategy.phase)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        ({"max_epochs": 4, "limit_train_batches": 2}, ["warm-up"] * 2 + ["cycling"] * 4 + ["cool-down"] * 2),
        ({"max_epochs": 1}, ["warm-up"] * 2 + ["cycling"] * 4 + ["cool-down"] * 2),
        ({"max_steps": 8}, ["warm-up"] * 2 + ["cycling"] * 4 + ["cool-down"] * 2),
        ({"max_steps": 32}, ["warm-up"] * 8 + ["cycling"] * 16 + ["cool-down"] * 8),  # four epochs of 8 batches
    ],
)
@pytest.mark.pooled
def test_a_short_run_by_name_trains_asynchronously_for_half_of_it(fit, length, expected):
    length = {"max_epochs": -1, **length}
    (report, *_) = fit(Phases(), {"scheme": "daso"}, limit_val_batches=0, **length)
    assert report["report"] == expected


class TwoInTurn(Phases):
    """Two optimizers step by hand in every batch; ``report`` is the phase of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.y = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.x.square().sum() + self.y.square().sum())
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in (self.x, self.y)]

    def on_train_batch_end(self, *_):
        self.report.append(self.trainer.strategy.schemes[0].phase)


@pytest.mark.pooled
def test_run_length_with_two_optimizers_is_half_of_lightnings_count(fit):
    (report, *_) = fit(TwoInTurn(), {"scheme": "daso"}, limit_val_batches=0, max_epochs=-1, max_steps=16)
    assert report["report"] == ["warm-up"] * 2 + ["cycling"] * 4 + ["cool-down"] * 2


@pytest.mark.pooled
def test_a_run_whose_epochs_accumulate_more_and_more_ends_when_it_does(fit):
    scheme = DASO(2, 1, warmup=0, cooldown=4)
    callbacks = [GradientAccumulationScheduler({1: 4})]  # 8 batches an epoch: 8 steps, and then 2 and 2
    (report, *_) = fit(Phases(), {"scheme": scheme}, limit_val_batches=0, max_epochs=3, callbacks=callbacks)
    phases = [phase for batch, phase in enumerate(report["report"]) if batch < 8 or batch % 4 == 3]
    assert phases == ["cycling"] * 8 + ["cool-down"] * 4


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


def test_waiting_every_few_batches_averages_at_those_and_at_the_end(run_oracle):
    # staleness 0: batches 0, 4 and the last of 8 end in the mean
    traces = run_oracle(cycling(4, 0))
    averaged = [a == b for a, b in zip(traces[0].after_step, traces[2].after_step, strict=True)]
    assert averaged == [True, False, False, False, True, False, False, False]
    assert traces[0].after_epoch == traces[2].after_epoch


def test_fixed_periods_stay_whatever_the_loss_does(run_oracle):
    (trace, *_) = run_oracle(cycling(4, 2, plateau=None), epochs=4, losses=[1.0] * 4)
    assert (trace.scheme.period, trace.scheme.staleness) == (4, 2)


def test_compressed_phases_without_a_wire_change_nothing():
    def train(compressed_phases: str) -> list[list[list[float]]]:
        cycle = {"warmup": 0, "cooldown": 0, "plateau": None, "reducer": "sharded"}
        scheme = DASO(3, 2, compressed_phases=compressed_phases, **cycle)
        return [rank.trace for rank in on_nodes(steps(8), scheme, TWO_BY_TWO)]

    assert train("blocking") == train("all")

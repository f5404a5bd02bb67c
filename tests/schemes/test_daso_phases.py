"""DASO's phases, and the plateaus at which it halves its period: on threads, and in a Trainer."""

from __future__ import annotations

import logging
import math
from functools import partial

import pytest
import torch
from harness import TWO_BY_TWO, attached, on_nodes, on_ranks
from problems import Oracle

from lightning_hiercomm.schemes import DASO, Epochs, Plateau
from lightning_hiercomm.schemes.plateau import PlateauDetector

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one
on_four_ranks = partial(on_nodes, nodes=TWO_BY_TWO, epochs=10)


def cycling(sync_every=4, staleness=1, **arguments):
    """A DASO that cycles from the first step to the last."""
    return lambda: DASO(sync_every, staleness, warmup=0, cooldown=0, **arguments)


def acted(rank, losses):
    """Train epochs of one step with these losses; phase, period and staleness of each."""
    seen = []
    for epoch, loss in enumerate(losses):
        rank.scheme.begin_epoch(epoch)
        scalars = rank.scheme.scalars()
        seen.append((rank.scheme.phase, int(scalars["sync_every"]), int(scalars["staleness"])))
        rank.train(last=True)
        rank.scheme.end_epoch(None if loss is None else torch.tensor(float(loss)))
    return seen


def test_phases_and_halving_follow_a_scripted_loss_exactly():
    losses = [9.0, 9.0, 8.0, 8.0, 8.0, 7.7, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0, 1.0, 1.0]
    scheme = DASO(8, 2, warmup=Epochs(2), cooldown=Epochs(2))
    expected = [
        *[("warm-up", 1, 0)] * 2,
        *[("cycling", 8, 2)] * 4,  # 8.0: the best, warm-up was not judged; 7.7 is the third not 5 % below it
        *[("cycling", 4, 1)] * 4,  # 7.0: better
        *[("cycling", 2, 1)] * 3,
        *[("cycling", 1, 1)] * 3,
        *[("cool-down", 1, 0)] * 2,
    ]
    assert on_four_ranks(partial(acted, losses=losses), scheme, epochs=18) == [expected] * 4


def test_b_and_s_return_to_their_first_values_from_one():
    scheme = DASO(4, 2, warmup=0, cooldown=Epochs(1), plateau=Plateau(patience=0))
    found = on_four_ranks(partial(acted, losses=[1.0] * 9), scheme, epochs=9)[0]
    periods = [(4, 2), (4, 2), (2, 1), (1, 1), (4, 2), (2, 1), (1, 1), (4, 2), (1, 0)]
    assert [each[1:] for each in found] == periods


def test_the_loss_is_judged_by_its_mean_over_all_ranks():
    # the mean falls 4, 3, 2 and then stays, whatever single ranks see
    losses = [(4, 4, 4, 4), (0, 9, 1, 2), (0, 0, 8, 0), (8, 0, 0, 0), (1, 1, 1, 1), (1, 1, 1, 1)]

    def work(rank):
        return [period for _, period, _ in acted(rank, [own[rank.rank] for own in losses])]

    assert on_four_ranks(work, cycling(plateau=Plateau(patience=0))()) == [[4, 4, 4, 4, 2, 2]] * 4


def test_epochs_without_a_loss_change_nothing_and_warn_once(caplog):
    found = on_four_ranks(partial(acted, losses=[None] * 4), cycling(plateau=Plateau(patience=0))())
    assert found == [[("cycling", 4, 1)] * 4] * 4
    assert [r.message.count("had no training loss") for r in caplog.records if r.levelno == logging.WARNING] == [1]


def test_fixed_periods_stay_whatever_the_loss_does(run_oracle):
    (trace, *_) = run_oracle(cycling(4, 2, plateau=None), epochs=4, losses=[1.0] * 4)
    assert (trace.scheme.period, trace.scheme.staleness) == (4, 2)


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


ENDS = [(1, 0), (3, 0), (4, 1), (7, 1), (8, 2), (12, 3), (15, 3), (16, 4), (17, 4), (40, 4)]


@pytest.mark.parametrize(
    ("scheme", "run", "lengths", "phases"),
    [
        *((scheme, (None, 10), [5, 5], (3, 5, 2)) for scheme in (DASO(2, 1, 3, 2), DASO(2, 1, 0.3, 0.2))),
        *((DASO(), (n, None), [1] * n, (quarter, n - 2 * quarter, quarter)) for n, quarter in ENDS),
        (DASO(), (None, None), [1] * 6, (4, 2, 0)),  # without an end there is no cool-down
        *((DASO(), (epochs, 13), [13], (3, 7, 3)) for epochs in (None, 1, 3)),  # a short run: a quarter of the steps
        *((DASO(), (epochs, 13), [12, 1], (12, 1, 0)) for epochs in (4, 7)),  # a quarter of the epochs
    ],
    ids=str,
)
def test_phases_last_for_their_epochs_steps_or_shares(scheme, run, lengths, phases):
    def work(rank):
        seen = []
        for epoch, length in enumerate(lengths):
            rank.scheme.begin_epoch(epoch)
            for _ in range(length):
                rank.train()
                seen.append(rank.scheme.phase)
        return [seen.count(phase) for phase in ("warm-up", "cycling", "cool-down")], seen

    epochs, steps = run
    ((counts, seen), *_) = on_four_ranks(work, scheme, epochs=epochs, steps=steps, begins_epoch=False)
    assert tuple(counts) == phases
    assert seen == sorted(seen, key=["warm-up", "cycling", "cool-down"].index)


class Watched(Oracle):
    """``report`` is the phase and B after each batch; if there are ``optimizers``, they step by hand in every batch."""

    def __init__(self, optimizers: int = 0, learning_rate: float = 0.5) -> None:
        super().__init__(8, learning_rate=learning_rate)
        self.automatic_optimization = not optimizers
        self.others = torch.nn.ParameterList(torch.zeros(1) for _ in range(optimizers - 1))

    def training_step(self, batch, batch_idx):
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        self.manual_backward(sum(parameter.square().sum() for parameter in self.parameters()))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD([parameter], lr=self.learning_rate) for parameter in self.parameters()]

    def on_train_batch_end(self, *_):
        scheme = self.trainer.strategy.schemes[0]
        self.report.append((scheme.phase, scheme.period))


@pytest.mark.pooled
def test_a_loss_that_stays_halves_b_and_returns_it_in_a_real_run(fit):
    # nothing is learnt at learning rate 0; every epoch after the first cycling one is a plateau
    scheme = DASO(4, 1, warmup=Epochs(1), cooldown=Epochs(1), plateau=Plateau(patience=0))
    reports = fit(Watched(learning_rate=0.0), {"scheme": scheme}, max_epochs=7, limit_train_batches=2)
    for report in reports:
        assert [period for _, period in report["report"][::2]] == [4, 4, 4, 2, 1, 4, 2]


@pytest.mark.parametrize(
    ("length", "optimizers", "quarter"),
    [
        ({"max_epochs": 4, "limit_train_batches": 2}, 0, 2),
        ({"max_epochs": 1}, 0, 2),
        ({"max_steps": 8}, 0, 2),
        ({"max_steps": 32}, 0, 8),  # four epochs of 8 batches
        ({"max_steps": 16}, 2, 2),  # Lightning counts the steps of both
    ],
    ids=str,
)
@pytest.mark.pooled
def test_a_short_run_by_name_trains_asynchronously_for_half_of_it(fit, length, optimizers, quarter):
    length = {"max_epochs": -1, **length}
    (report, *_) = fit(Watched(optimizers), {"scheme": "daso"}, limit_val_batches=0, **length)
    phases = [phase for phase, _ in report["report"]]
    assert phases == ["warm-up"] * quarter + ["cycling"] * 2 * quarter + ["cool-down"] * quarter


@pytest.mark.parametrize(
    ("losses", "arguments", "reached"),
    [
        pytest.param([1.0] * 7, {}, [3, 6], id="the third value without improvement"),
        pytest.param([8.0, 7.6], {"patience": 0}, [1], id="a fall by the threshold is no improvement"),
        pytest.param([8.0, 7.59], {"patience": 0}, [], id="a fall by more is one"),
        pytest.param([0.96**n for n in range(20)], {"patience": 1}, [], id="slow progress adds up"),
        pytest.param([1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5], {}, [6], id="an improvement resets the count"),
        pytest.param([-1.0, -1.02, -1.1, -1.0], {"patience": 0}, [1, 3], id="a negative loss must fall too"),
        pytest.param([math.nan, math.inf, 3.0, 3.1, 2.0], {"patience": 1}, [1], id="NaN never becomes the best"),
    ],
)
def test_a_plateau_is_reached_after_its_patience(losses, arguments, reached):
    plateau = PlateauDetector(Plateau(**arguments))
    assert [n for n, loss in enumerate(losses) if plateau.reached(loss)] == reached

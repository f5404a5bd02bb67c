"""Everything that goes together, at random: see :mod:`combinations`, which draws thousands by hand."""

from __future__ import annotations

import pytest
from combinations import Combination, check, drawn
from pairwise import on_push

BATCH = 20


@pytest.mark.long("twenty runs on threads, and a calculation of its own for each")
@pytest.mark.parametrize("first", on_push(range(0, 200, BATCH), 0))
def test_random_combinations_equal_an_independent_calculation(first):
    for number in range(first, first + BATCH):
        try:
            check(drawn(number))
        except Exception as error:
            error.add_note(f"python -m tools.combinations --only {number}\n{drawn(number)}")
            raise


@pytest.mark.parametrize("merge", ["eq1", "delta", "nesterov", "adam"])
@pytest.mark.parametrize("wire", [None, "int8"])
def test_an_exchange_in_flight_at_an_epochs_end_is_merged_before_the_next(merge, wire):
    arguments = {"schedule": ("epoch", 3), "fragments": 1, "reducer": "sharded", "merge": merge, "staleness": 2}
    check(Combination("parameter_sync", arguments, wire=wire, resume=7, looks=(7,)))


@pytest.mark.parametrize("resume", [None, 5])
@pytest.mark.parametrize("nodes", ["1+1", "2x2", "3+1"])
def test_a_server_counts_steps_per_parameter(nodes, resume):
    arguments = {"delay": 2, "warmup_steps": 4, "local_update": "sgd"}
    check(Combination("steps_delay", arguments, nodes, optimizer="adam", unfreeze=3, resume=resume))
    check(Combination("steps_delay", arguments, nodes, optimizer="adamw", freeze=2, again=6, resume=resume))


def test_steps_delay_steps_while_all_parameters_are_frozen():
    arguments = {"delay": 4, "warmup_steps": 4, "local_update": "glu"}
    check(Combination("steps_delay", arguments, two=True, unfreeze=7, freeze=3))


def test_gossip_replicas_have_bit_equal_weights_after_a_resume():
    arguments = {"graph": "roulette", "fragments": 3, "overlap": False, "push_sum": True}
    check(Combination("gossip", arguments, "2x2", weights=(1.0, 1.0, 1.0, 3.0), reweight=0, resume=2))


def test_an_optimizer_with_all_parameters_frozen_has_no_fragments():
    arguments = {"sync_every": 3, "outer_optimizer": "momentum", "fragments": 2, "staleness": 0}
    check(Combination("diloco", arguments, two=True, unfreeze=5, freeze=1))

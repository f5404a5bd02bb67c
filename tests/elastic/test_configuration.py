"""What elastic nodes cannot do is refused before anything starts, with what to take instead."""

from __future__ import annotations

from functools import partial

import pytest

from lightning_hiercomm import (
    DASO,
    AllReduce,
    DiLoCo,
    Elastic,
    Gossip,
    HeterogeneousBatches,
    HierarchicalStrategy,
    PeriodicAveraging,
    StepsDelay,
)
from lightning_hiercomm.elastic import configuration
from lightning_hiercomm.schemes import ParameterSync, Ring
from lightning_hiercomm.schemes.components.merges import Replace


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"min_nodes": 0}, "min_nodes=0"),
        ({"dead_after": 0.1}, "dead_after=0.1"),
        ({"dead_after": "5"}, "dead_after"),
        ({"lighthouse": "10.0.0.1"}, "must be HOST:PORT"),
        ({"lighthouse": "10.0.0.1:x"}, "must be HOST:PORT"),
        ({"lighthouse": "http://10.0.0.1:29510"}, "must be HOST:PORT"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(arguments, said):
    with pytest.raises((ValueError, TypeError), match=said):
        Elastic(**arguments)


def test_the_lighthouse_comes_from_an_argument_or_the_environment(monkeypatch):
    monkeypatch.delenv("HIERCOMM_LIGHTHOUSE", raising=False)
    with pytest.raises(ValueError, match="python -m lightning_hiercomm lighthouse` on one machine"):
        Elastic().address()
    monkeypatch.setenv("HIERCOMM_LIGHTHOUSE", "[::1]:29510")
    assert Elastic().address() == "[::1]:29510"
    assert HierarchicalStrategy("diloco", elastic="10.0.0.1:29510")._settings.elastic.address() == "10.0.0.1:29510"  # noqa: SLF001


@pytest.mark.parametrize(
    "scheme",
    [
        PeriodicAveraging(),
        PeriodicAveraging(sync_every=None),
        DiLoCo(sync_every=20),
        DiLoCo(sync_every=20, fragments=4, keep_local=0.5),
        ParameterSync(schedule=10),
        ParameterSync(schedule=10, reducer=Ring()),
        ParameterSync(schedule=10, fragments=2),
        ParameterSync(schedule=10, merge=Replace(0.5)),
        DASO(reducer="sharded", staleness=0),
    ],
    ids=repr,
)
@pytest.mark.parametrize("wire", [None, "bfloat16", "int4"])
def test_elastic_accepts_schemes_with_periodic_synchronization(scheme, wire):
    assert HierarchicalStrategy(scheme, elastic=Elastic(), wire_dtype=wire)._settings.elastic == Elastic()  # noqa: SLF001


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (AllReduce, "AllReduce waits for all nodes at every step.*use PeriodicAveraging or DiLoCo"),
        (StepsDelay, "StepsDelay does not support nodes that leave and join"),
        (Gossip, "Gossip does not support nodes that leave and join"),
        (DASO, "DASO with reducer='leader' sends from the ranks of a node in turn: use reducer='sharded'"),
        (partial(DASO, reducer="sharded"), "staleness=1 merges averages of nodes that may have left.*use staleness=0"),
        (partial(DiLoCo, sync_every=20, fragments=4, staleness=4), "staleness=4.*use staleness=0"),
        (partial(ParameterSync, schedule=10, staleness=9, merge="delta"), "staleness=9.*use staleness=0"),
        (partial(ParameterSync, reducer="leader"), "use reducer='sharded'"),
        (partial(PeriodicAveraging, order="before_step"), "use order='after_step'"),
    ],
)
def test_schemes_that_cannot_lose_a_node_are_refused_with_a_remedy(make, said):
    with pytest.raises(ValueError, match=said):
        HierarchicalStrategy(make(), elastic=Elastic())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batches": HeterogeneousBatches(16)}, "leave batches out"),
        ({"ranks_per_node": 2}, "leave ranks_per_node out"),
        ({"average_optimizer_state": True}, "leave average_optimizer_state out"),
        ({"checkpoint_replicas": True}, "leave checkpoint_replicas out"),
    ],
)
def test_settings_that_need_nodes_that_stay_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        HierarchicalStrategy("periodic", elastic=Elastic(), **settings)


def test_without_torchft_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(configuration.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install torchft"):
        configuration.check_torchft()


def test_the_line_at_the_start_of_fit_shows_what_is_not_the_default():
    assert repr(Elastic(dead_after=2)) == "Elastic(min_nodes=1, dead_after=2)"

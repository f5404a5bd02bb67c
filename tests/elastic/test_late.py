"""Late nodes of an elastic run: left out of a synchronization, and merged when they come, in the same process."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from elastic_cluster import Cluster, ends_equal
from elastic_threads import ElasticRank, Threads
from forked import ForkedPython

from lightning_hiercomm import DiLoCo, Elastic, PeriodicAveraging
from lightning_hiercomm.elastic.late import ArrivalTimes, OwnProgress, merge_progress, weight_of
from lightning_hiercomm.elastic.quorum import Rebase


@pytest.mark.long("three nodes that are processes, and a stop of seconds")
@pytest.mark.parametrize(
    "scheme", ["diloco", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("periodic", "streaming"))]
)
def test_stopped_node_continues_in_the_same_process(tmp_path: Path, scheme: str) -> None:
    pytest.importorskip("torchft", reason="needs the extra `elastic`")
    elastic = {"min_nodes": 2, "dead_after": 1.0, "late": "merge"}
    settings = {"scheme": scheme, "epochs": 5, "batches": 30, "every": 10, "pause": 0.03, "elastic": elastic}
    with Cluster(tmp_path, ForkedPython, dead_after=1.0, **settings) as nodes:
        for node in range(3):
            nodes.start(node, elastic=elastic)
        nodes.watch(until=lambda: bool(nodes.steps(1)) and nodes.steps(1)[-1][1] > 14)
        nodes.signal(1, signal.SIGSTOP)
        stopped = nodes.steps(1)[-1][1]
        nodes.watch(until=lambda: nodes.steps(0)[-1][1] > stopped + 25)
        nodes.signal(1, signal.SIGCONT)
        nodes.watch(restarts=False)
        first = ends_equal(nodes, [0, 1, 2])
        assert nodes.incarnations == {"0": 0, "1": 0, "2": 0}, nodes.said()
        assert first["communication"]["missed_syncs"] >= 2, nodes.said()
        assert "node 1 was late" in nodes.log(1)
        assert first["global_step"] == 150


def test_grace_is_a_quarter_of_the_median_round_or_three_times_a_quantile() -> None:
    times = ArrivalTimes()
    for _ in range(2):
        times.add([4.0, 4.0, 4.0])
    assert times.longest() is None, "two rounds are too few"
    times.add([4.0, 4.0, 0.0])  # 0: not known
    assert times.grace() == 1.0
    assert times.longest() == 5.0
    assert times.longest(bound=0.5) == 4.5
    times = ArrivalTimes()
    for _ in range(10):
        times.add([4.0, 4.0, 5.0])  # the 0.9 quantile of the delays 0, 0, 1 is 1
    assert times.grace() == 3.0
    assert times.longest() == 7.0


def test_one_slow_arrival_of_many_does_not_lengthen_the_grace_period() -> None:
    times = ArrivalTimes()
    for number in range(10):
        times.add([4.0, 4.0, 9.0 if number == 3 else 4.0])  # one delay of 30
    assert times.grace() == 1.0


@pytest.mark.parametrize(("age", "weight"), [(0, 1.0), (3, 0.5), (8, 1 / 3)])
def test_weight_is_one_over_the_root_of_one_plus_the_age(age: int, weight: float) -> None:
    assert weight_of(age) == pytest.approx(weight, abs=1e-12)


def test_late_progress_is_added_to_the_new_average_with_its_weight() -> None:
    own = {"w": torch.tensor([10.0, 20.0])}
    progress = OwnProgress()
    progress.begin(own)
    own["w"] += torch.tensor([-4.0, 2.0])
    differences = progress.differences(own)
    own["w"].copy_(torch.tensor([7.0, 21.0]))  # the others' average, three synchronizations later
    merge_progress(own, differences, age=3)
    assert own["w"].tolist() == [5.0, 22.0]  # 7 - 4 / 2, 21 + 2 / 2


HALF = partial(torch.optim.SGD, lr=0.5)  # the outer step is half of the way to the average


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("scheme", "averages"),
    [
        # all begin at 1, and step by -1, +2 and -1: (-1 + 5 - 1) / 3 = 1, then (-1 + 5) / 2 = 2, and so on;
        # the late node has made a step of -1 from 1, so it goes on from 4 - 1 / 2: (2 + 8 + 1.5) / 3
        (PeriodicAveraging(sync_every=2), [1.0, 2.0, 3.0, 4.0, 11.5 / 3]),
        # half of that way; the late node goes on from 2.5 - 1 / 2: (0.5 + 6.5 + 0) / 3 = 7 / 3
        (DiLoCo(sync_every=2, outer_optimizer=HALF), [1.0, 1.5, 2.0, 2.5, 2.5 - (2.5 - 7 / 3) / 2]),
    ],
    ids=["replace", "outer optimizer"],
)
def test_late_merge_is_a_trace_by_hand(scheme: PeriodicAveraging, averages: list[float], ranks: int) -> None:
    lost, third, asked = threading.Barrier(3 * ranks), threading.Barrier(3 * ranks), threading.Barrier(3 * ranks)
    nodes = Threads(scheme, Elastic(dead_after=5.0, late="merge"))

    def others(rank: ElasticRank) -> list[float]:
        rank.join()
        seen = []
        for step in range(10):
            if step in (3, 6):
                lost.wait(10) if step == 3 else (third.wait(10), asked.wait(10))
            rank.step(-4.0 if rank.node == "1" else 2.0)
            if step % 2:
                seen.append(rank.rank.values.item())
        return seen

    def late(rank: ElasticRank) -> list[float]:
        rank.join()
        own, progress, membership = {"x": rank.rank.parameters[0]}, OwnProgress(), rank.membership
        rank.step(2.0)
        rank.step(2.0)
        progress.begin(own)
        seen = [rank.rank.values.item()]
        rank.step(2.0)
        nodes.lights.lose("2")
        lost.wait(10)
        third.wait(10)  # the others have synchronized twice without it
        membership.rendezvous.ask_late()
        asked.wait(10)
        deadline = time.monotonic() + 10
        while (state := membership.late_state(at_once=True)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        differences = progress.differences(own)
        with torch.no_grad():
            own["x"].copy_(state["values"][0])
        rank.scheme.follow(rank.rank.replica())
        rank.scheme.load_state_dict(state["schedule"])
        seen.append(rank.rank.values.item())
        merge_progress(own, differences, membership.late_age)
        while rank.scheme.state.steps < 10:
            rank.step(2.0)
        seen.append(rank.rank.values.item())
        assert membership.late_age == 3
        assert membership.history.missed == {"2": 3}
        return seen

    results = nodes.play(lambda rank: late(rank) if rank.node == "2" else others(rank), (ranks,) * 3)
    for (node, _), seen in results.items():
        assert seen == pytest.approx(averages if node != "2" else [averages[0], *averages[3:]], abs=1e-6)


def test_late_node_asks_again_after_an_answer_that_it_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sent heartbeats but no request, so that all waited for each other."""
    lost, ahead, done = threading.Event(), threading.Event(), threading.Event()
    nodes = Threads(PeriodicAveraging(sync_every=2), Elastic(dead_after=5.0, late="merge"))

    def other(rank: ElasticRank) -> None:
        rank.join()
        for _ in range(3):
            rank.step(2.0)
        assert lost.wait(10)
        rank.step(2.0)
        ahead.set()
        while not done.is_set():
            rank.step(2.0)

    def late(rank: ElasticRank) -> int:
        rank.join()
        rank.step(2.0)
        rank.step(2.0)
        nodes.lights.lose("1")
        lost.set()
        assert ahead.wait(10)
        rendezvous, unusable = rank.membership.rendezvous, iter([True])
        can_recover = rendezvous._can_recover  # noqa: SLF001
        monkeypatch.setattr(
            rendezvous, "_can_recover", lambda quorum: not next(unusable, False) and can_recover(quorum)
        )
        rank.step(2.0)
        rank.step(2.0)  # skips a synchronization
        rank.step(2.0)
        with pytest.raises(Rebase):
            rank.step(2.0)
        done.set()
        return len([*unusable])

    results = nodes.play(lambda rank: late(rank) if rank.node == "1" else other(rank))
    assert results["1", 0] == 0

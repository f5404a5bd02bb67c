"""A run whose nodes came and went is trained once more from its record, to the bit."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from covering import leaving_to_the_night
from elastic_cluster import JOB, Cluster
from elastic_threads import ElasticRank, Failing, Threads, Wires
from forked import ForkedPython
from torch.utils.data import DataLoader

from lightning_hiercomm import DiLoCo, PeriodicAveraging
from lightning_hiercomm.__main__ import main
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.elastic.record import Epoch, Record, Recorder, digest
from lightning_hiercomm.elastic.transaction import Transaction
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.planning.errors import PlanningError
from lightning_hiercomm.planning.simulate import replay as module_of_replay
from lightning_hiercomm.planning.simulate.replay import Program, replay
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import DASO, Agreement, Gossip, OuterOptimizer, RandomPermutation, Scheme

SHAPES = {"a": (7, 3), "b": (5,), "c": (40,)}
STEPS, EPOCH = 18, 8
SCHEMES = {
    "periodic": PeriodicAveraging(sync_every=3),
    "diloco": DiLoCo(sync_every=3),
    "fragments": DiLoCo(sync_every=4, fragments=2, keep_local=0.25),
    "late": DiLoCo(sync_every=4, staleness=2),
    "gossip": Gossip(),
    "noloco": Agreement(when=3, through=RandomPermutation(), merge=OuterOptimizer()),
}


def gradient(sample: int, values: torch.Tensor) -> torch.Tensor:
    """Of a sample: its own, and towards zero."""
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(sample))
    return noise + 0.1 * values


class Toy(torch.nn.ParameterDict):
    """What ranks of the harness train, as a module that has their gradients."""

    def __init__(self) -> None:
        super().__init__({name: torch.full(shape, 1.0) for name, shape in SHAPES.items()})

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        values = torch.cat([parameter.flatten() for parameter in self.parameters()])
        return (values * gradient(int(batch), values.detach())).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adam(list(self.parameters()))


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def program(scheme: Scheme, wire: str | None) -> Program:
    return Program(Toy(), DataLoader(range(64), batch_size=1), scheme, wire)


def about(scheme: Scheme, wire: str | None) -> dict[str, Any]:
    """What a Trainer would have told the recorder."""
    module = Toy()
    alone = Topology([[0]], 0, ThreadWorld(1).connect(0), Meter())
    run = TrainingRun(scheme, Replicas(module, [adam(list(module.parameters()))]), alone, Wire.named(wire))
    said = {"run": f"run:{run.fingerprint()}", "scheme": repr(scheme), "optimizers": 1, "wire": repr(Wire.named(wire))}
    said |= {"bucket_bytes": 64, "average_buffers": True, "begins_after_steps": 0, "accumulate_grad_batches": 1}
    return {**said, "gradient_clip_val": 0, "precision": "32-true", "seed": 0, "threads": 1}


class Played:
    """An elastic run on threads, in which a node dies, comes back and is healed, an exchange breaks, and some look."""

    def __init__(self, scheme: Scheme, wire: str | None, sizes: tuple[int, ...], forgets: bool = False) -> None:
        self.scheme, self.wire, self.sizes, self.forgets = scheme, wire, sizes, forgets
        training = {"inner": adam, "shapes": SHAPES, "bucket_bytes": 64, "wire": wire}
        self.threads = Threads(scheme, training=training)
        self.threads.lights.min_nodes = len(sizes)
        self.recorders: dict[tuple[str, int], Recorder] = {}
        for node, ranks in enumerate(sizes):
            self.threads.start(node, partial(self.work, dies_at=5 if node == 1 else None), ranks)
        self.values = self.threads.end()
        self.record = self.recorders["0", 0].record
        self.record.steps = STEPS

    def work(self, own: ElasticRank, dies_at: int | None = None) -> torch.Tensor:
        recorder = Recorder(about(self.scheme, self.wire))
        looks = False

        def note(meeting: Any) -> None:
            draw = own.membership.draw
            recorder.note(meeting, looks, own.scheme.steps, draw.shares, draw.total)

        own.transaction.has_agreed = note
        state, heal = own.state, own.membership.heal
        own.state = lambda: None if (its := state()) is None else {**its, "record": recorder.give()}

        def healed(source: Any) -> dict[str, Any] | None:
            its = heal(source)
            if its is not None:
                recorder.take(its["record"])
            return its

        own.membership.heal = healed
        if own.join() and self.forgets:
            own.rank.optimizer.state.clear()
        while own.scheme.steps < STEPS:
            steps = own.scheme.steps
            if steps % EPOCH == 0:
                own.membership.begin_epoch(steps)
                own.scheme.begin_epoch(steps // EPOCH, {})
                draw = own.membership.draw
                recorder.note_epoch(steps // EPOCH, steps, draw.shares, draw.total)
            own.membership.give_state(own.state)
            if steps == dies_at:
                own.die()
            if steps == 6 and own.node == "0" and own.local == 0:
                self.threads.start(1, self.work, self.sizes[1])
                self._wait_for("1")
            if steps == 13 and own.node == "0" and own.local == 0:
                self._break(own)
            me = own.membership.me
            sample = me.shares[own.local] + steps % EPOCH * me.all_shares
            own.rank.train(partial(gradient, sample), last=(steps + 1) % EPOCH == 0)
            if (steps + 1) % EPOCH == 0:
                own.scheme.end_epoch(None)
            if steps in (4, 10):
                looks = True
                own.transaction(lambda: None)
                looks = False
        if STEPS % EPOCH:
            own.scheme.end_epoch(None)  # as a Trainer ends one that is cut short
        own.scheme.finish()
        own.membership.give_state(own.state)
        self.recorders[own.node, own.local] = recorder
        return own.rank.values

    def _wait_for(self, node: str) -> None:
        done = threading.Event()
        for _ in range(2000):
            if node in self.threads.lights._alive.values():
                return
            done.wait(0.005)
        raise AssertionError("it did not come")

    @staticmethod
    def _break(own: ElasticRank) -> None:
        """Let a move of the next exchange never arrive."""
        lane = own.rank.topology.lane
        launch = lane._launch

        def breaks(start: Any) -> Any:
            move = launch(start)
            lane._launch = launch
            if getattr(move, "_move", None) is not None:
                move._move = Failing(move._move)
            return move

        lane._launch = breaks


@pytest.mark.parametrize("sizes", [pytest.param((1, 1), marks=pytest.mark.nightly), (1, 2, 1)], ids=str)
@pytest.mark.parametrize(("name", "wire"), leaving_to_the_night(itertools.product(SCHEMES, [None, "int8"])))
def test_a_replay_ends_with_the_bits_of_a_run_in_which_a_node_died_and_was_healed(name, sizes, wire):
    scheme = SCHEMES[name]
    played = Played(scheme, wire, sizes)
    assert len(played.record.lives) == len(sizes) + 1
    assert sum(len(entry.newcomers) for entry in played.record.entries) >= 1
    for recorder in played.recorders.values():
        plain = recorder.record.to_plain()
        assert {**plain, "steps": STEPS} == played.record.to_plain(), "on all nodes the same, also on the healed one"
    record = Record.from_plain(json.loads(json.dumps(played.record.to_plain())))
    again = replay(record, program(scheme, wire), Wires())
    values = torch.cat([parameter.detach().flatten() for parameter in again.parameters()])
    for own in played.values.values():
        torch.testing.assert_close(own, values, rtol=0, atol=0)


def test_a_rank_that_is_slow_to_begin_while_the_first_of_its_node_meets_the_others_follows_the_record_too(monkeypatch):
    def slowly(*arguments: Any) -> Transaction:
        if threading.current_thread().name == "0.1":
            time.sleep(0.2)
        return Transaction(*arguments)

    scheme = SCHEMES["periodic"]
    played = Played(scheme, None, (2, 1))
    monkeypatch.setattr(module_of_replay, "Transaction", slowly)
    again = replay(played.record, program(scheme, None), Wires())
    values = torch.cat([parameter.detach().flatten() for parameter in again.parameters()])
    torch.testing.assert_close(played.values["0", 0], values, rtol=0, atol=0)


def test_a_heal_that_forgets_the_optimizers_state_is_found_out():
    scheme = SCHEMES["diloco"]
    played = Played(scheme, None, (1, 1), forgets=True)
    first, second = played.values.values()
    torch.testing.assert_close(first, second, rtol=0, atol=0)  # nodes are equal all the same
    again = replay(played.record, program(scheme, None), Wires())
    values = torch.cat([parameter.detach().flatten() for parameter in again.parameters()])
    assert not torch.equal(first, values)


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(SCHEMES["periodic"], None, (1, 1))


def test_a_record_that_contradicts_itself_is_refused(played):
    record, made = played.record, program(SCHEMES["periodic"], None)
    *_, last = [entry for entry in record.entries if len(entry.members) == 2]
    number = record.entries.index(last)
    wrong = dataclasses.replace(last, members=last.members[:1])
    changed = dataclasses.replace(record, entries=[*record.entries[:number], wrong, *record.entries[number + 1 :]])
    with pytest.raises(PlanningError, match="goes another way than its record"):
        replay(changed, made, Wires())
    with pytest.raises(PlanningError, match="goes another way than its record"):
        replay(dataclasses.replace(record, epochs={0: record.epochs[0]}), made, Wires())


def finished(**more: Any) -> Record:
    scheme = SCHEMES["periodic"]
    return Record(about={**about(scheme, None), **more}, steps=3, epochs={0: Epoch(0, {}, 1)})


def test_nodes_meet_again_though_one_that_is_not_among_them_is_late_to_learn_that_the_last_meeting_is_over(monkeypatch):
    class OneIsLate(threading.Condition):
        def wait_for(self, predicate: Any, timeout: float | None = None) -> bool:
            if threading.current_thread().name == "first again":
                is_waiting.set()
            is_over = super().wait_for(predicate, timeout)
            if threading.current_thread().name == "late":
                self.release()
                assert is_waiting.wait(5.0)
                self.acquire()
            return is_over

    monkeypatch.setattr(module_of_replay, "_PATIENCE", 5.0)
    script = module_of_replay._Script(Record(about={}, lives={}), lambda life: None)
    script._changed, is_waiting = OneIsLate(), threading.Event()
    of_two, again = SimpleNamespace(token="1", members="ab"), SimpleNamespace(token="2", members="ac")
    left: list[str] = []

    def meet(name: str, meeting: Any, life: str) -> threading.Thread:
        def work() -> None:
            script.wait_for_all(meeting, life)
            left.append(name)

        thread = threading.Thread(target=work, name=name)
        thread.start()
        return thread

    late = meet("late", of_two, "b")
    meet("first", of_two, "a").join()
    first_again = meet("first again", again, "a")
    late.join()
    meet("another", again, "c").join()
    first_again.join()
    assert sorted(left) == ["another", "first", "first again", "late"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"begins_after_steps": 7}, "the run went on from a checkpoint"),
        ({"optimizers": 2}, "the module has several optimizers"),
        ({"accumulate_grad_batches": 4}, "gradients were accumulated"),
        ({"gradient_clip_val": 1.0}, "gradients were clipped"),
        ({"precision": "bf16-mixed"}, "its precision was bf16-mixed"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_reason(changes, message):
    with pytest.raises(PlanningError, match=message):
        replay(finished(**changes), program(SCHEMES["periodic"], None), Wires())


def test_a_run_that_is_not_over_and_one_of_large_nodes_are_refused():
    with pytest.raises(PlanningError, match="the run was not over"):
        replay(dataclasses.replace(finished(), steps=0), program(SCHEMES["periodic"], None), Wires())
    with pytest.raises(PlanningError, match="DASO's phases"):
        replay(finished(), program(DASO(exchange="sharded"), None), Wires())
    with pytest.raises(PlanningError, match="a node had 4 ranks"):
        replay(dataclasses.replace(finished(), lives={"x": ("0", 4)}), program(SCHEMES["periodic"], None), Wires())


def test_another_scheme_wire_or_module_is_refused(played):
    for other in (program(PeriodicAveraging(sync_every=4), None), program(SCHEMES["periodic"], "int8")):
        with pytest.raises(PlanningError, match="the record is of PeriodicAveraging"):
            replay(played.record, other, Wires())


def test_a_step_that_draws_random_numbers_is_refused(played):
    class Dropout(Toy):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            torch.rand(1)
            return super().training_step(batch, index)

    made = dataclasses.replace(program(SCHEMES["periodic"], None), module=Dropout())
    with pytest.raises(PlanningError, match="random numbers"):
        replay(played.record, made, Wires())


def test_a_scheduler_steps_when_its_frequency_divides_the_batches_of_the_epoch(played):
    """As Lightning's: not those of the run."""
    stepped = set()

    class Notes:
        def __init__(self, module: Toy) -> None:
            self.module = module

        def step(self) -> None:
            stepped.add(self.module.index)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Scheduled(Toy):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            self.index = index
            return super().training_step(batch, index)

        def configure_optimizers(self) -> Any:
            scheduler = {"scheduler": Notes(self), "interval": "step", "frequency": 3}
            return [super().configure_optimizers()], [scheduler]

    replay(played.record, dataclasses.replace(program(SCHEMES["periodic"], None), module=Scheduled()), Wires())
    assert stepped == {2, 5}


def test_an_error_in_the_program_ends_the_replay_and_is_said(played):
    class Broken(Toy):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            raise KeyError("label")

    made = dataclasses.replace(program(SCHEMES["periodic"], None), module=Broken())
    with pytest.raises(PlanningError, match="label"):
        replay(played.record, made, Wires())


def test_the_command_says_whether_the_bits_are_equal(played, tmp_path, capsys, monkeypatch):
    record = dataclasses.replace(played.record, parameters=digest(replay(played.record, program(played.scheme, None))))
    record.write(tmp_path / "elastic.json")
    source = Path(__file__)
    (tmp_path / "train.py").write_text(
        f"import sys\nsys.path.insert(0, {str(source.parent)!r})\n"
        f"from {source.stem} import SCHEMES, program\n"
        "def trained(node):\n    assert node == '0'\n    return program(SCHEMES['periodic'], None)\n"
        "def nothing(node):\n    return 7\n"
    )
    place = f"{tmp_path / 'train.py'}:trained"
    out = tmp_path / "model.pt"
    assert main(["replay", str(tmp_path / "elastic.json"), place, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "replayed: equal to the bit" in said
    assert "node 1 has come, and goes on from node 0" in said
    assert torch.load(out).keys() == SHAPES.keys()
    dataclasses.replace(record, parameters="").write(tmp_path / "other.json")
    assert main(["replay", str(tmp_path / "other.json"), place]) == 1
    assert "OTHER parameters" in capsys.readouterr().out
    for arguments, message in [
        (["nowhere.json", place], "cannot read nowhere.json as the record of an elastic run"),
        ([str(tmp_path / "elastic.json"), "nowhere.py:trained"], "it must be file.py:function"),
        ([str(tmp_path / "elastic.json"), f"{tmp_path / 'train.py'}:other"], "it must be file.py:function"),
        ([str(tmp_path / "elastic.json"), f"{tmp_path / 'train.py'}:nothing"], "returned int: it must return"),
    ]:
        assert main(["replay", *arguments]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert len(said.splitlines()) == 1


def hash_of(module: torch.nn.Module) -> str:
    """As the job hashes what it ends with."""
    values = [value for _, value in sorted(module.state_dict().items()) if value.is_floating_point()]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()[:16]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("scheme", "ranks"),
    [("periodic", 1), ("periodic", 2), ("diloco", 1), ("diloco", 2), ("streaming", 1), ("gossip", 1)],
)
def test_a_run_of_processes_that_were_killed_and_healed_is_replayed_on_threads_to_the_bit(
    tmp_path, monkeypatch, scheme, ranks
):
    """By the job's own module and data; a validation looks at the model after every epoch."""
    pytest.importorskip("torchft", reason="needs the extra `elastic`")
    monkeypatch.syspath_prepend(JOB.parent)
    import elastic_node

    lasting = {"epochs": 7, "pause": 0.01, "hold": {"28": "1.1", "48": "2.1"}, "validates": True}
    with Cluster(tmp_path, ForkedPython, min_nodes=3, scheme=scheme, ranks=ranks, **lasting) as nodes:
        for node in range(3):
            nodes.start(node, fault="kill:in the exchange:3" if node == 1 else "")
        nodes.watch(until=lambda: bool(nodes.steps(2)) and nodes.steps(2)[-1][1] > 36)
        nodes.signal(2, signal.SIGKILL)
        nodes.watch()
        ended = {nodes.result(node)["parameters"] for node in range(3)}
        assert len(ended) == 1, nodes.said()
        assert nodes.lives == {"0": 0, "1": 1, "2": 1}, nodes.said()
    (path,) = tmp_path.glob("elastic-*.json")
    record = Record.read(path)
    assert len(record.lives) >= 5
    torch.manual_seed(0)
    first = record.lives[record.entries[0].members[0]][0]
    module = elastic_node.Net(0.0, sum(map(ord, first)))
    loader = DataLoader(elastic_node.data(4096), batch_size=8, shuffle=True)
    again = replay(record, Program(module, loader, elastic_node.SCHEMES[scheme](4)))
    assert digest(again) == record.parameters
    assert {hash_of(again)} == ended

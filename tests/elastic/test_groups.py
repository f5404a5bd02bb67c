"""Process groups between the nodes of a quorum, over gloo; no node waits for one that does not answer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from harness import on_ranks
from torch.distributed import TCPStore

from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.staged import StagedCommunicator
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.elastic.groups import InterNodeGroup, NodesWorld
from lightning_hiercomm.elastic.quorum import Quorum, Request
from lightning_hiercomm.elastic.transport import GlooTransport


def quorum_of(names: str = "ab") -> tuple[TCPStore, Quorum]:
    """With the store at which its members find each other."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    members = (Request(name, replica_id=name, run="run", ranks=1, store=f"127.0.0.1:{store.port}") for name in names)
    return store, Quorum(tuple(members))


@pytest.mark.parametrize("has_gpu", [False, True])
def test_collectives_stay_in_their_group_and_are_staged_on_gpus(has_gpu, monkeypatch):
    """The default process group, if there is one, is that of one node."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    _store, quorum = quorum_of("abc")

    def member(index: int) -> tuple[list[float], float, set[float], list[str], bool]:
        meter, values, first = Meter(), torch.arange(3.0) * (index + 1), torch.full((2**20,), 1.0 + index)
        group = GlooTransport("127.0.0.1", dead_after=20.0).connect_group(quorum, index, "0", meter)
        group.all_reduce(values).wait()
        sent_bytes = meter.snapshot()["inter_bytes"]
        group.broadcast(first, 1).wait()
        gathered = group.all_gather_object("of " + "abc"[: index + 1])
        group.close()
        return values.tolist(), sent_bytes, {*first.tolist()}, gathered, isinstance(group, StagedCommunicator)

    expected = [0.0, 6.0, 12.0], 2 * 2 / 3 * 12, {2.0}, ["of a", "of ab", "of abc"], has_gpu
    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(member, range(3))] == [expected] * 3


def test_inter_node_bytes_are_counted_once():
    def member(rank: int, world: ThreadWorld) -> tuple[float, float]:
        meter, tensor, buffer = Meter(), torch.ones(3), torch.zeros(3)
        group = InterNodeGroup(meter)
        group.is_open = True
        group.connect(world.connect(rank, meter)([[0, 1]], "inter"))
        group.all_reduce(tensor).wait()
        group.exchange([(tensor, 1 - rank)], [(buffer, 1 - rank)]).wait()  # as what is encoded travels
        return meter.bytes["inter"], meter.messages["inter"]

    assert ThreadWorld(2).run(member) == [(24.0, 2)] * 2


@pytest.mark.parametrize("node", [0, 1])
def test_gather_over_unequal_nodes_has_all_entries_after_a_failure(node):
    """Who looked for another rank's raised an IndexError, which is not taken back."""
    nodes = [[0, 1], [2]]

    def gather(topology):
        group = InterNodeGroup(Meter())
        group.size, group.is_open = len(nodes), True
        world = NodesWorld(topology.intra, group if topology.local_rank == 0 else None)
        world.reform(nodes, node)
        return world.all_gather_object("own")

    assert on_ranks(gather, (range(len(nodes[node])),)) == [["own"] * 3] * len(nodes[node])


def test_a_missing_member_is_found_before_the_group_connects():
    _store, quorum = quorum_of()
    with pytest.raises(RuntimeError):
        GlooTransport("127.0.0.1", dead_after=1.0).connect_group(quorum, 0, "0", Meter())


@pytest.mark.parametrize("dead_after", [0.5, 1.5, 5.0, 20.0])
@pytest.mark.parametrize("keeps_the_group", [True, False])
def test_loss_while_connecting_takes_no_longer_than_between_syncs(dead_after, keeps_the_group):
    """All that is waited for, until it is known who does not answer; the lighthouse misses it at the same time."""
    waited = []

    class Transport(GlooTransport):
        def ask(self, address, query, timeout=None):
            is_here = not keeps_the_group and not waited
            waited.append(0.0 if is_here else self._set_up.total_seconds() if timeout is None else timeout)
            if not is_here:
                raise RuntimeError("does not answer")

    transport = Transport("127.0.0.1", dead_after)
    with pytest.raises(RuntimeError):
        transport.connect_group(quorum_of()[1], 1, "0", Meter())
    assert 0 < sum(waited) <= dead_after + 1.0


def keep_store(port) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    port.send(store.port)
    time.sleep(60)


@pytest.fixture
def node():
    """A process that keeps something for others, and its address."""
    ours, its = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=keep_store, args=(its,), daemon=True)
    process.start()
    yield process.pid, f"127.0.0.1:{ours.recv()}"
    process.kill()
    process.join()


def read(store):
    return store.get("key")


@pytest.mark.long("a process imports torch, and its death is missed after a while")
def test_kept_state_is_read_and_a_dead_node_is_detected(node):
    process, address = node
    transport = GlooTransport("127.0.0.1", dead_after=4.0)
    assert transport.ask(address, read) == b"value"
    assert transport.ask_all([address], read) == {address: b"value"}
    assert GlooTransport("127.0.0.1", dead_after=0.5).ask_all(["127.0.0.1:9"], read) == {}
    os.kill(process, signal.SIGKILL)
    with pytest.raises(RuntimeError):
        transport.ask(address, lambda store: store.wait(["other"], timedelta(seconds=1)))
    assert not transport.ask_all([address], read)


@pytest.mark.parametrize("is_known", [True, False])
def test_stopped_node_delays_no_other_and_answers_when_continued(node, is_known):
    """A store's client does, for ever: its connection stands, for the kernel keeps it."""
    process, address = node
    transport = GlooTransport("127.0.0.1", dead_after=0.5)
    if is_known:
        transport.ask(address, read, 10.0)
    os.kill(process, signal.SIGSTOP)
    os.waitpid(process, os.WUNTRACED)  # the signal is sent: its threads may still answer until they are all stopped
    with pytest.raises(RuntimeError, match="does not answer"):
        transport.ask(address, read, 0.2)
    assert not transport.ask_all([address], read)
    os.kill(process, signal.SIGCONT)
    assert transport.ask(address, read, 30.0) == b"value"


def test_no_abandoned_question_outlives_the_transport():
    """A thread that comes back from a store's client at interpreter exit ended the process with SIGABRT."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    transport, address = GlooTransport("127.0.0.1", dead_after=4.0), f"127.0.0.1:{store.port}"
    answers, before = threading.Event(), set(threading.enumerate())

    def asking() -> bool:
        return any(thread.name == "ask-node" for thread in {*threading.enumerate()} - before)

    def query(_: object) -> None:
        answers.wait(60)

    with pytest.raises(RuntimeError, match="does not answer"):
        transport.ask(address, query, 0.05)
    assert not transport.ask_all([address], query)
    assert asking()
    answers.set()
    transport.finish()
    assert not asking()

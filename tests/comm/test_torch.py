"""What the communicator over torch's process groups does by itself, whichever backend carries it."""

from __future__ import annotations

import os
import queue
import resource
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_hiercomm.comm import torch as over_torch
from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.torch import TorchCommunicator, _TorchHandle, connect_torch


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (1024, 1024, 1024),
        (1024, 4096, 4096),
        (1024, 2**30, 2**16),
        (1024, resource.RLIM_INFINITY, 2**16),
        (2**20, resource.RLIM_INFINITY, 2**20),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_limit_on_open_files_is_raised_as_far_as_ranks_need_and_it_may(monkeypatch, soft, hard, then):
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append(both))
    over_torch.raise_limit_on_open_files()
    assert limits[-1] == (then, hard)


@pytest.mark.parametrize("is_nccl", [True, False])
def test_nccl_connects_once_before_exchanges_of_a_subset(is_nccl, monkeypatch, process_group):
    gathers: list[object] = []
    monkeypatch.setattr(dist, "all_gather_object", lambda values, value, group: gathers.append(group))
    group = TorchCommunicator(None, [0], 0, "inter", Meter())
    group.is_nccl = is_nccl
    group.expect_exchanges()
    group.expect_exchanges()
    assert len(gathers) == int(is_nccl)


NODES = ([0, 1, 2], [3, 4])
INTER_NODE = ([0, 3], [1, 4])


@pytest.fixture
def made(monkeypatch):
    """The groups that a rank of a pretended world makes, and how."""
    made: list[tuple[list[int], dict[str, object]]] = []
    new_group = dist.new_group

    def noted(ranks, *settings, **how):
        made.append((ranks, {**how, "lazy": os.environ.get("TORCH_GLOO_LAZY_INIT")}))
        return new_group(ranks, *settings, **how)

    monkeypatch.setattr(dist, "new_group", noted)
    yield made
    dist.destroy_process_group()


def pretend(rank: int, size: int = 5) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


@pytest.mark.skipif(not over_torch.group_names_are_equal(), reason="before torch 2.14 all ranks make all groups")
@pytest.mark.parametrize("rank", range(5))
def test_a_rank_makes_its_own_groups_only_and_as_many_as_every_other(rank, made):
    pretend(rank)
    connect = connect_torch(Meter())
    groups = [connect([range(5)], "world"), connect(NODES, "intra"), connect(INTER_NODE, "inter")]
    own = [range(5), NODES[rank // 3], INTER_NODE[rank % 3] if rank != 2 else None]
    assert [group and list(group.ranks) for group in groups] == [ranks and list(ranks) for ranks in own]
    assert [ranks for ranks, _ in made] == [own[1], own[2] or [2]]  # of one rank alone: all ranks count alike
    assert all(how["use_local_synchronization"] for _, how in made)
    assert groups[0].group is None
    for group in groups:
        if group is not None:
            group.close()
    assert list(dist.distributed_c10d._world.pg_map) == [dist.group.WORLD]


@pytest.mark.parametrize(
    ("version", "is_equal"),
    [("2.4.0", False), ("2.13.1+cpu", False), ("2.14.0", True), ("2.15.0a0", True), ("3.0", True)],
)
def test_ranks_name_groups_equally_from_torch_2_14_on(version, is_equal, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert over_torch.group_names_are_equal() == is_equal


@pytest.mark.parametrize("rank", range(5))
def test_where_all_ranks_make_all_groups_every_rank_is_in_one_of_them(rank, made, monkeypatch):
    """For a group of gloo that a rank is not in, torch splits nccl's communicator: a move of all ranks.

    Ranks without an inter-node group split it one time more than others, and waited forever.
    """
    monkeypatch.setattr(over_torch, "group_names_are_equal", lambda: False)
    pretend(rank)
    group = connect_torch(Meter())(INTER_NODE, "inter")
    assert (group and list(group.ranks)) == (None if rank == 2 else INTER_NODE[rank % 3])
    assert [ranks for ranks, _ in made] == [*INTER_NODE, [2]]
    assert not any("use_local_synchronization" in how for _, how in made)
    assert len(dist.distributed_c10d._world.pg_map) == (1 if rank == 2 else 2)  # with the world


def test_a_default_group_of_gloo_with_a_device_is_not_split(launch):
    """Lightning gives it one on GPUs; torch then asks gloo to split, which it cannot."""
    assert launch(_groups_of_one, ranks=2) == [((0,), "cuda:0"), ((1,), "cuda:0")]


def _groups_of_one(folder):
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    default = dist.distributed_c10d._get_default_group()
    default.bound_device_id = torch.device("cuda", 0)
    over_torch.group_names_are_equal = lambda: False  # then all ranks make all groups
    own = connect_torch(Meter())([[0], [1]], "intra")
    try:
        return own.ranks, str(default.bound_device_id)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(Version(torch.__version__) < Version("2.8"), reason="this torch always connects all pairs")
def test_large_groups_connect_lazily_by_default(made, monkeypatch):
    pretend(0, size=40)
    connect = connect_torch(Meter())
    connect([range(16)], "inter")
    connect([range(17)], "inter")
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    connect([range(18)], "inter")
    assert [how["lazy"] for _, how in made] == [None, "1", "0"]


def test_an_error_of_a_large_group_names_a_few_of_its_ranks(made):
    pretend(0, size=4000)
    error = TorchCommunicator(None, range(4000), 0, "world", Meter()).failure(RuntimeError("reset by peer"))
    assert str(error) == "rank 0 lost its world group (ranks [0, 1, 2, 3, 4, 5, 6, 7] and 3992 more): reset by peer"


class Post:
    """Sends objects between ranks that are threads, instead of torch's functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[int, int]] = []
        self._me = threading.local()
        self._boxes: dict[tuple[int, int], queue.Queue[list[object]]] = defaultdict(queue.Queue)
        monkeypatch.setattr(dist, "send_object_list", self.send)
        monkeypatch.setattr(dist, "recv_object_list", self.recv)

    def send(self, objects: list[object], peer: int, group: object) -> None:
        self.sent.append((self._me.rank, peer))
        self._boxes[self._me.rank, peer].put(objects)

    def recv(self, objects: list[object], peer: int, group: object) -> None:
        objects[:] = self._boxes[peer, self._me.rank].get(timeout=20.0)

    def gather(self, ranks: Sequence[int], values: Sequence[object]) -> list[list[object]]:
        gathered: dict[int, list[object]] = {}

        def play(rank: int, value: object) -> None:
            self._me.rank = rank
            gathered[rank] = TorchCommunicator(None, ranks, rank, "world", Meter()).all_gather_object(value)

        players = [threading.Thread(target=play, args=each, daemon=True) for each in zip(ranks, values, strict=True)]
        for player in players:
            player.start()
        for player in players:
            player.join(30.0)
        return [gathered[rank] for rank in ranks]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 16, 21])
def test_gathering_objects_over_gloo_sends_two_per_member(size, monkeypatch, process_group):
    post = Post(monkeypatch)
    ranks = [3 * member for member in range(size)]
    values = [(member, "a place", None) for member in range(size)]
    assert post.gather(ranks, values) == [values] * size
    assert len(post.sent) == 2 * (size - 1)
    peers = Counter(sender for sender, _ in post.sent)
    assert max(peers.values(), default=0) <= size.bit_length()


def test_members_of_a_large_group_connect_to_neighbors_only(monkeypatch, process_group):
    posted: list[tuple[str, int]] = []

    class Operation:
        def __init__(self, move, tensor, peer, group) -> None:
            posted.append((move.__name__, peer))

    monkeypatch.setattr(dist, "P2POp", Operation)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: [])
    ranks = [*range(0, 80, 4)]
    TorchCommunicator(None, ranks, 76, "inter", Meter()).connect_neighbors()
    assert posted == [("irecv", 72), ("isend", 0)]


@pytest.fixture
def over_gloo(process_group) -> TorchCommunicator:
    return TorchCommunicator(None, [0], 0, "inter", Meter())


@pytest.mark.parametrize(("backend", "is_nccl"), [("gloo", False), ("nccl", True), ("cpu:gloo,cuda:nccl", True)])
def test_nccl_is_detected_in_a_group_with_a_backend_per_device(over_gloo, monkeypatch, backend, is_nccl):
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    assert TorchCommunicator(None, [0], 0, "inter", Meter()).is_nccl == is_nccl


class Work:
    """Of gloo with a GPU's tensor: only a wait knows of the stream that copies the result back."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def get_future(self) -> None:
        raise AssertionError("gloo's future does not know of the copy back")


def test_a_future_of_gloo_s_for_a_gpu_s_tensor_waits_for_the_copy_back(over_gloo, fake_device):
    work, bucket = Work(), torch.ones(3)
    handle = _TorchHandle(over_gloo, [work], [bucket])
    assert handle.future(bucket).wait() is bucket
    assert work.waits == 1


def test_reduce_scatter_of_a_gpu_over_gloo_keeps_its_inputs_alive(over_gloo, fake_device, monkeypatch):
    def all_to_all(arrived, tensor, group, async_op):
        arrived.copy_(tensor)

    monkeypatch.setattr("torch.distributed.all_to_all_single", all_to_all)
    with fake_device.watching():
        output, tensor = torch.zeros(3), torch.arange(3.0)
        background = Background(output.device, Meter())
        background.uses(output)
        job = background.submit(over_gloo._reduce_scatter(output, tensor).wait)  # noqa: SLF001
        torch.ones(3)  # which may get the memory of what has been given back
        job.wait()
        assert output.tolist() == [0.0, 1.0, 2.0]


def test_gloo_gets_no_address_of_a_gpu_s_memory(over_gloo, fake_device, monkeypatch):
    posted = []

    def post(send, receive, tag):
        posted.extend((*send, *receive))
        for (sent, _), (received, _) in zip(send, receive, strict=True):
            received.copy_(sent)
        return []

    monkeypatch.setattr(over_gloo, "_post", post)
    with fake_device.watching():
        sent, received = torch.arange(3.0), torch.zeros(3)
        handle = over_gloo._exchange([(sent, 1)], [(received, 1)])  # noqa: SLF001
        handle.wait()
        assert fake_device.waits == ["an event"]
        assert received.tolist() == [0.0, 1.0, 2.0]
    assert len(posted) == 2
    assert not {tensor.data_ptr() for tensor, _ in posted} & {sent.data_ptr(), received.data_ptr()}

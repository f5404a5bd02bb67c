"""Measure the start of a run against its number of ranks: seconds, keys in the store, and open files.

Forked ranks of one machine do what the strategy does. They rendezvous, start the control plane, create torch's default
process group, create the topology and a duplicate of it for asynchronous traffic, and synchronize once in each. Other
ranks do what DDP does: they create the default process group and a connection to its store. With fewer processors than
ranks, all ranks wait for processors: then processor seconds mean more than the seconds of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from benchmarks.crowd import Crowd
from benchmarks.crowd import measure as measure_crowd
from lightning_hiercomm.comm.torch import MOST_IN_MESH, connecting_when_needed, raise_limit_on_open_files
from lightning_hiercomm.control import bootstrap
from lightning_hiercomm.control import plane as control
from lightning_hiercomm.control.plane import ControlPlane
from lightning_hiercomm.nodes.connect import connect_world
from lightning_hiercomm.nodes.hosts import Place

STARTING = ("rendezvous", "group", "topology", "duplicate")
PHASES = (*STARTING, "synchronization")
DDP = "ddp"
"""The only phase of the ranks that do what DDP does."""


class CountingStore(dist.Store):
    """Counts the keys in a rank's requests to a store, and its repeated requests, whose number depends on the time."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.keys = self.repeated_requests = 0
        self._store = store
        self._seen: set[tuple[str, str]] = set()

    def _counted(self, request: str, *keys: str) -> dist.Store:
        new = {(request, key) for key in keys} - self._seen
        self._seen |= new
        self.keys += len(new)
        self.repeated_requests += not new
        return self._store

    def set(self, key: str, value: Any) -> None:
        self._counted("set", key).set(key, value)

    def get(self, key: str) -> bytes:
        return self._counted("get", key).get(key)

    def add(self, key: str, value: int) -> int:
        return self._counted("add", key).add(key, value)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._counted("compare_set", key).compare_set(key, expected, value)

    def check(self, keys: list[str]) -> bool:
        if self._store.check(keys):
            self._counted("check", *keys)
            return True
        self.repeated_requests += 1
        return False

    def wait(self, keys: list[str], timeout: timedelta = timedelta(minutes=5)) -> None:
        self._counted("wait", *keys).wait(keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._counted("get", *keys).multi_get(keys)

    def has_extended_api(self) -> bool:
        return False


@dataclass
class Rank:
    """The cost of one rank by phase; open files are counted at the end of the phase."""

    seconds: dict[str, float] = field(default_factory=dict)
    processor_seconds: dict[str, float] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    open_files: dict[str, int] = field(default_factory=dict)
    repeated_checks: int = 0


@dataclass
class Start:
    """The cost of a start by phase; the phase ``"ddp"`` is the start of as many ranks that do what DDP does.

    Attributes:
        lazy_default_group: Whether DDP's ranks also connect when they first communicate.
        seconds: Time of the slowest rank.
        processor_seconds: Processor time of all ranks together.
        keys: Keys in requests to the store, of all ranks together.
        repeated_checks: Requests while ranks waited; their number depends on the machine's speed.
        open_files: Files that a rank opened by the end of the phase: the maximum over all ranks except rank 0.
        open_files_of_rank_0: The same of rank 0, which serves the store.
        load: The machine's load before the start.
    """

    ranks: int
    ranks_per_node: int
    lazy_default_group: bool
    seconds: dict[str, float]
    processor_seconds: dict[str, float]
    keys: dict[str, int]
    open_files: dict[str, int]
    open_files_of_rank_0: dict[str, int]
    repeated_checks: int
    load: float = 0.0

    def beyond(self, of: str) -> float:
        """Return the extra cost in ``of`` (``"seconds"`` or ``"processor_seconds"``) as a share of DDP's."""
        spent: dict[str, float] = getattr(self, of)
        return sum(spent[phase] for phase in STARTING) / spent[DDP] - 1.0

    @property
    def extra_open_files(self) -> int:
        """Open files of a rank beyond DDP's, after the synchronization."""
        return self.open_files["synchronization"] - self.open_files[DDP]


def measure(ranks: int, ranks_per_node: int, timeout: float = 300.0, lazy_default_group: bool = False) -> Start:
    """Start ranks as DDP does and as the strategy does, and measure both.

    Raises:
        RuntimeError: If a rank fails, or a start takes longer than ``timeout`` seconds.
    """
    load = os.getloadavg()[0]
    arguments = (ranks, ranks_per_node, timeout, lazy_default_group)
    results = [(_run_ranks(_start_as_ddp, *arguments), (DDP,)), (_run_ranks(_start, *arguments), PHASES)]
    by_phase = [(phase, found) for found, phases in results for phase in phases]
    return Start(
        ranks,
        ranks_per_node,
        lazy_default_group,
        seconds={phase: max(rank.seconds[phase] for rank in found) for phase, found in by_phase},
        processor_seconds={phase: sum(rank.processor_seconds[phase] for rank in found) for phase, found in by_phase},
        keys={phase: sum(rank.keys[phase] for rank in found) for phase, found in by_phase},
        open_files={phase: max(rank.open_files[phase] for rank in found[1:] or found) for phase, found in by_phase},
        open_files_of_rank_0={phase: found[0].open_files[phase] for phase, found in by_phase},
        repeated_checks=sum(rank.repeated_checks for rank in results[-1][0]),
        load=load,
    )


Work = Callable[[int, int, int, int, "Rank"], None]
"""A rank's work: takes its number, the number of ranks, the ranks per node, a port, and a record to fill."""


def _run_ranks(work: Work, ranks: int, ranks_per_node: int, timeout: float, lazy: bool) -> list[Rank]:
    """Run all ranks and return their records; ends all processes, also after an error."""
    port, context = find_free_network_port(), multiprocessing.get_context("fork")
    line, go = context.Pipe(duplex=False)
    links: list[Connection] = []
    processes = []
    try:
        for rank in range(ranks):
            own, theirs = context.Pipe(duplex=False)
            arguments = (work, rank, ranks, ranks_per_node, port, lazy, line, go, theirs, list(links))
            processes.append(context.Process(target=_run_rank, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            links.append(own)
        deadline = time.monotonic() + timeout
        _receive(links, deadline)  # all ranks have started
        go.close()
        return [Rank(**each) for each in _receive(links, deadline)]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for link in (*links, line):
            link.close()


def _receive(links: Sequence[Connection], deadline: float) -> list[Any]:
    received: dict[Connection, Any] = {}
    while len(received) < len(links):
        ready = wait([link for link in links if link not in received], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"{len(links) - len(received)} of {len(links)} ranks are not done in time")
        for link in ready:
            assert isinstance(link, Connection)
            try:
                received[link] = link.recv()
            except EOFError:
                raise RuntimeError(f"rank {links.index(link)} died") from None
            if isinstance(received[link], str):
                raise RuntimeError(f"rank {links.index(link)}: {received[link]}")
    return [received[link] for link in links]


def _run_rank(
    work: Work,
    rank: int,
    size: int,
    ranks_per_node: int,
    port: int,
    lazy: bool,
    line: Connection,
    go: Connection,
    parent: Connection,
    inherited: Sequence[Connection],
) -> None:
    for link in (go, *inherited):  # one open file less for each; the start signal is the end of `line`
        link.close()
    torch.set_num_threads(1)
    if lazy:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    spent = Rank()
    try:
        parent.send({})
        select.select([line], [], [])
        work(rank, size, ranks_per_node, port, spent)
        parent.send(asdict(spent))
    except BaseException as error:
        parent.send(f"{type(error).__name__}: {error}")
    time.sleep(60.0)  # the parent ends all ranks at once


class Phases:
    """Records the cost of a rank, phase by phase."""

    def __init__(self, spent: Rank) -> None:
        self._spent = spent
        self._stores: list[CountingStore] = []
        self._open_files = _open_files()
        connect = bootstrap._connect
        bootstrap._connect = lambda *arguments, **settings: self.counting(connect(*arguments, **settings))

    def counting(self, store: dist.Store) -> CountingStore:
        """Return a store that counts requests from now on."""
        self._stores.append(CountingStore(store))
        return self._stores[-1]

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        keys, seconds, processor_seconds = self._keys(), time.perf_counter(), time.process_time()
        yield
        self._spent.seconds[name] = time.perf_counter() - seconds
        self._spent.processor_seconds[name] = time.process_time() - processor_seconds
        self._spent.keys[name] = self._keys() - keys
        self._spent.open_files[name] = _open_files() - self._open_files
        self._spent.repeated_checks = sum(store.repeated_requests for store in self._stores)

    def _keys(self) -> int:
        return sum(store.keys for store in self._stores)


_LIMIT = timedelta(minutes=10)


def _start_as_ddp(rank: int, size: int, ranks_per_node: int, port: int, spent: Rank) -> None:
    phase = Phases(spent)
    with phase(DDP):
        store = phase.counting(dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=_LIMIT))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_LIMIT)
    dist.barrier()  # no rank closes its connections before the others have finished


def _start(rank: int, size: int, ranks_per_node: int, port: int, spent: Rank) -> None:
    phase, node = Phases(spent), rank // ranks_per_node
    with phase("rendezvous"):
        raise_limit_on_open_files()
        joined = bootstrap.Bootstrap("127.0.0.1", port, rank, size, _LIMIT)
        joined.gather("127.0.0.1")  # as for the interfaces of gloo
        plane = ControlPlane(rank, size, f"rank {rank} (node {node})", hang_timeout=300.0)
        own = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)  # heartbeats are not counted
        control.connect_again = lambda store: own
        plane.start(own, f"hiercomm/{joined.attempt}/control")
    with phase("group"), nullcontext() if size <= MOST_IN_MESH else connecting_when_needed():
        dist.init_process_group("gloo", store=joined.store("process group"), rank=rank, world_size=size, timeout=_LIMIT)
    with phase("topology"):
        topology = connect_world(rank, size, Place(node, rank % ranks_per_node), timeout=_LIMIT)
    with phase("duplicate"):
        duplicate = topology.duplicate()
    with phase("synchronization"):
        for group in (topology.inter, duplicate.inter):
            if group is not None:
                values = torch.full((1000,), float(rank))
                group.all_reduce(values).wait()
                if values[0] != sum(group.ranks):
                    raise RuntimeError(f"the sum over the inter-node group is wrong: {values[0]}")
    topology.world.barrier()  # as above
    plane.close()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- tables ----------------------------------------------------------------------------------------------------------


def page(starts: Sequence[Start], crowds: Sequence[Crowd] = ()) -> str:
    """Return the tables in Markdown."""
    lines = [
        "# The start of a run\n",
        f"`python -m benchmarks startup` measures forked ranks on one machine with {os.cpu_count()} processors, over"
        " gloo. Our start is the rendezvous (with the control plane), torch's default process group, the topology, and"
        " a duplicate of the topology. DDP's start is the default process group, which connects every rank with every"
        f" other, and a connection to the store. With more than {_largest_mesh()} ranks, ours connect when they first"
        " communicate.\n",
        "- Seconds: of the slowest rank. Processor seconds: of all ranks together.",
        "- Extra: our start's extra cost as a share of DDP's; below 0 it costs less.",
        "- Names: torch looks up the name of each address that connects to its store. Where the name server drops such"
        " queries, each of our two waves of connections waits for the resolver's timeout, 5 s by default.\n",
        "| ranks | per node | seconds: rendezvous | group | topology | duplicate | DDP's | extra"
        " | processor seconds: all | DDP's | extra |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for start in starts:
        seconds = " | ".join(f"{start.seconds[phase]:.2f}" for phase in (*STARTING, DDP))
        whole = sum(start.processor_seconds[phase] for phase in STARTING)
        lines.append(
            f"| {_titled(start)} | {start.ranks_per_node} | {seconds} | {start.beyond('seconds'):.2f} | {whole:.1f}"
            f" | {start.processor_seconds[DDP]:.1f} | {start.beyond('processor_seconds'):.2f} |"
        )
    lines += [
        "\nThe machine's load before each start (seconds mean little where it is far from 0):"
        f" {', '.join(f'{start.load:.0f}' for start in starts)}.",
        "\nKeys are those in requests to the store, without heartbeats."
        " Open files are those of a rank after it synchronized once in its"
        " inter-node group of the topology and of the duplicate.\n",
        "| ranks | keys | per rank | DDP's | per rank | open files of a rank | DDP's | extra | of rank 0 | DDP's |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for start in starts:
        keys, of_ddp = sum(start.keys[phase] for phase in PHASES), start.keys[DDP]
        lines.append(
            f"| {_titled(start)} | {keys} | {keys / start.ranks:.1f} | {of_ddp} | {of_ddp / start.ranks:.1f}"
            f" | {start.open_files['synchronization']} | {start.open_files[DDP]} | {start.extra_open_files}"
            f" | {start.open_files_of_rank_0['synchronization']} | {start.open_files_of_rank_0[DDP]} |"
        )
    if any(start.lazy_default_group for start in starts):
        lines.append("\nlazy: with `TORCH_GLOO_LAZY_INIT=1`, DDP's ranks also connect when they first communicate.")
    for crowd in crowds:
        lines.append(
            f"\nThe control plane of {crowd.ranks} forked ranks that do nothing else: all were forked and joined after"
            f" {crowd.joined_seconds:.1f} s. A failure reached all of them after {crowd.failure_seconds:.2f} s. During"
            f" {crowd.watched_seconds:.0f} s of heartbeats the store used {crowd.share_of_core:.1%} of a processor, and"
            f" each rank {crowd.share_of_rank:.2%}."
        )
    return "\n".join(lines) + "\n"


def _titled(start: Start) -> str:
    return f"{start.ranks}{' (lazy)' if start.lazy_default_group else ''}"


def _largest_mesh() -> int:
    return MOST_IN_MESH


def add_arguments(parser: argparse.ArgumentParser, out: Path) -> None:
    """Add the command's arguments."""
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 32, 64])
    parser.add_argument(
        "--crowd", type=int, nargs="*", default=[], metavar="RANKS", help="measure the store's load of as many ranks"
    )
    parser.add_argument("--ranks-per-node", type=int, default=4)
    parser.add_argument("--lazy", action="store_true", help="with TORCH_GLOO_LAZY_INIT=1 for all groups")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a start counts as hung")
    parser.add_argument("--out", type=Path, default=out, help="the folder that gets startup.json, .md and .png")
    parser.add_argument("--stored", action="store_true", help="only write the table and the picture again")


def command(arguments: argparse.Namespace) -> None:
    """Measure starts; each is stored when it ends."""
    path = arguments.out / "startup.json"
    found, crowds = load(path)
    starts = {_name(start): start for start in found}

    def save() -> None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        ordered, by_size = [starts[name] for name in sorted(starts)], sorted(crowds, key=lambda crowd: crowd.ranks)
        stored = {"starts": [asdict(start) for start in ordered], "crowds": [asdict(crowd) for crowd in by_size]}
        path.write_text(json.dumps(stored, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(ordered, by_size))

    for ranks in () if arguments.stored else arguments.ranks:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if ranks > most // 2:
            sys.exit(f"{ranks} ranks need more open files than the limit of {most}")
        start = measure(ranks, arguments.ranks_per_node, arguments.timeout, arguments.lazy)
        starts[_name(start)] = start
        save()
        print(page([start]), flush=True)
    for ranks in () if arguments.stored else arguments.crowd:
        crowds = [crowd for crowd in crowds if crowd.ranks != ranks] + [measure_crowd(ranks)]
        save()
    if starts:
        from benchmarks import plots

        save()
        plots.startup([starts[name] for name in sorted(starts)], path.with_suffix(".png"))
    print(path.with_suffix(".md"))


def load(path: Path) -> tuple[list[Start], list[Crowd]]:
    """Return the stored results."""
    stored = json.loads(path.read_text()) if path.exists() else {"starts": [], "crowds": []}
    return [Start(**start) for start in stored["starts"]], [Crowd(**crowd) for crowd in stored["crowds"]]


def _name(start: Start) -> tuple[int, int, bool]:
    return start.ranks, start.ranks_per_node, start.lazy_default_group

"""What a run costs before its first step, and how that grows with its ranks: seconds, words through the store, handles.

Forked ranks do what the strategy does, on one machine: they meet and start the control plane, make torch's default
process group over the connection that they met through, make the topology, and a twin for traffic beside training, and
agree twice in their lanes. Others do what DDP does, for comparison: that group, and a connection to its store. A
machine with fewer processors than ranks is what all of them wait for, so processor seconds say more than seconds of the
slowest rank, and counts say most.
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
from lightning_hiercomm.comm.torch import connecting_when_needed
from lightning_hiercomm.control import bootstrap
from lightning_hiercomm.control.open_files import has_mesh, needed_files, raise_limit
from lightning_hiercomm.control.plane import start_control_plane
from lightning_hiercomm.nodes.connect import connect_world
from lightning_hiercomm.nodes.hosts import Place

STARTING = ("meeting", "group", "topology", "twin")
PHASES = (*STARTING, "agreements")
DDP = "ddp"
"""The one phase of the ranks that do what DDP does."""


class CountingStore(dist.Store):
    """Counts the keys that a rank names to a store; apart, how often it asks for one that is not there yet."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.words = self.questions_again = 0
        self._store = store

    def _named(self, keys: int = 1) -> dist.Store:
        self.words += keys
        return self._store

    def set(self, key: str, value: Any) -> None:
        self._named().set(key, value)

    def get(self, key: str) -> bytes:
        return self._named().get(key)

    def add(self, key: str, value: int) -> int:
        return self._named().add(key, value)

    def check(self, keys: list[str]) -> bool:
        if self._store.check(keys):
            self.words += len(keys)
            return True
        self.questions_again += 1
        return False

    def wait(self, keys: list[str], timeout: timedelta = timedelta(minutes=5)) -> None:
        self._named(len(keys)).wait(keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._named(len(keys)).multi_get(keys)

    def has_extended_api(self) -> bool:
        return False


@dataclass
class Rank:
    """What one rank has spent, by phase; handles are those that are open when the phase ends."""

    seconds: dict[str, float] = field(default_factory=dict)
    processor_seconds: dict[str, float] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)
    handles: dict[str, int] = field(default_factory=dict)
    questions_again: int = 0


@dataclass
class Start:
    """The start of a run, by phase, and as one of them, ``"ddp"``, the start of as many ranks that do what DDP does.

    Attributes:
        lazy_default_group: Whether DDP's ranks, too, connect when they have something to say.
        seconds: Of the slowest rank.
        processor_seconds: Of all ranks together.
        words: Keys named to the store, by all ranks together.
        questions_again: How often they asked for a key that was not there yet: as often as the machine lets them wait.
        handles: Open files of the rank with most of them, but for rank 0, at the end; less those that it began with.
        handles_of_rank_0: The same of rank 0, where the store is.
        load: Of the machine, before.
    """

    ranks: int
    ranks_per_node: int
    lazy_default_group: bool
    seconds: dict[str, float]
    processor_seconds: dict[str, float]
    words: dict[str, int]
    handles: dict[str, int]
    handles_of_rank_0: dict[str, int]
    questions_again: int
    load: float = 0.0

    def beyond(self, of: str) -> float:
        """What the start takes of ``of`` beyond what DDP takes, as a share of that."""
        spent: dict[str, float] = getattr(self, of)
        return sum(spent[phase] for phase in STARTING) / spent[DDP] - 1.0

    @property
    def handles_beyond(self) -> int:
        """Open files of a rank beyond what DDP needs, after the agreements."""
        return self.handles["agreements"] - self.handles[DDP]


def measure(ranks: int, ranks_per_node: int, timeout: float = 300.0, lazy_default_group: bool = False) -> Start:
    """Start so many ranks, as DDP does and as the strategy does, and see what they spend.

    Raises:
        RuntimeError: If a rank fails, or a start takes longer than ``timeout`` seconds.
    """
    load = os.getloadavg()[0]
    arguments = (ranks, ranks_per_node, timeout, lazy_default_group)
    played = [(_played(_start_as_ddp, *arguments), (DDP,)), (_played(_start, *arguments), PHASES)]
    by_phase = [(phase, found) for found, phases in played for phase in phases]
    return Start(
        ranks,
        ranks_per_node,
        lazy_default_group,
        seconds={phase: max(rank.seconds[phase] for rank in found) for phase, found in by_phase},
        processor_seconds={phase: sum(rank.processor_seconds[phase] for rank in found) for phase, found in by_phase},
        words={phase: sum(rank.words[phase] for rank in found) for phase, found in by_phase},
        handles={phase: max(rank.handles[phase] for rank in found[1:] or found) for phase, found in by_phase},
        handles_of_rank_0={phase: found[0].handles[phase] for phase, found in by_phase},
        questions_again=sum(rank.questions_again for rank in played[-1][0]),
        load=load,
    )


Work = Callable[[int, int, int, int, "Rank"], None]
"""What a rank does, given its number, how many there are, how many on a node, a port, and where to note it all."""


def _played(work: Work, ranks: int, ranks_per_node: int, timeout: float, lazy: bool) -> list[Rank]:
    """What every rank spent. Whatever happens, none is left afterwards."""
    port, context = find_free_network_port(), multiprocessing.get_context("fork")
    line, go = context.Pipe(duplex=False)
    links: list[Connection] = []
    processes = []
    try:
        for rank in range(ranks):
            own, theirs = context.Pipe(duplex=False)
            arguments = (work, rank, ranks, ranks_per_node, port, lazy, line, go, theirs, list(links))
            processes.append(context.Process(target=_play, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            links.append(own)
        deadline = time.monotonic() + timeout
        _hear(links, deadline)  # all are there
        go.close()
        return [Rank(**each) for each in _hear(links, deadline)]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for link in (*links, line):
            link.close()


def _hear(links: Sequence[Connection], deadline: float) -> list[Any]:
    said: dict[Connection, Any] = {}
    while len(said) < len(links):
        ready = wait([link for link in links if link not in said], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"{len(links) - len(said)} of {len(links)} ranks are not done in time")
        for link in ready:
            assert isinstance(link, Connection)
            try:
                said[link] = link.recv()
            except EOFError:
                raise RuntimeError(f"rank {links.index(link)} died") from None
            if isinstance(said[link], str):
                raise RuntimeError(f"rank {links.index(link)}: {said[link]}")
    return [said[link] for link in links]


def _play(
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
    for link in (go, *inherited):  # a handle less each, and the line ends when the parent says so
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
    time.sleep(60.0)  # the parent ends all at once


class Phases:
    """Notes what a rank spends, phase by phase."""

    def __init__(self, spent: Rank) -> None:
        self._spent = spent
        self._stores: list[CountingStore] = []
        self._handles = _handles()
        make = bootstrap.TCPStore

        def counted(*arguments: Any, **settings: Any) -> CountingStore:
            self._stores.append(CountingStore(make(*arguments, **settings)))
            return self._stores[-1]

        bootstrap.TCPStore = counted  # type: ignore[misc,assignment]

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        words, seconds, processor_seconds = self._words(), time.perf_counter(), time.process_time()
        yield
        self._spent.seconds[name] = time.perf_counter() - seconds
        self._spent.processor_seconds[name] = time.process_time() - processor_seconds
        self._spent.words[name] = self._words() - words
        self._spent.handles[name] = _handles() - self._handles
        self._spent.questions_again = sum(store.questions_again for store in self._stores)

    def _words(self) -> int:
        return sum(store.words for store in self._stores)


_LIMIT = timedelta(minutes=10)


def _start_as_ddp(rank: int, size: int, ranks_per_node: int, port: int, spent: Rank) -> None:
    with Phases(spent)(DDP):
        store = bootstrap.TCPStore("127.0.0.1", port, size, rank == 0, timeout=_LIMIT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_LIMIT)
    dist.barrier()  # whoever ends now takes nothing away from others


def _start(rank: int, size: int, ranks_per_node: int, port: int, spent: Rank) -> None:
    phase, node = Phases(spent), rank // ranks_per_node
    with phase("meeting"):
        raise_limit(needed_files(size))
        meeting = bootstrap.Bootstrap("127.0.0.1", port, rank, size, _LIMIT)
        about = (f"rank {rank} (node {node})", "127.0.0.1", 0, 300.0)
        plane = start_control_plane(rank, size, *about, meeting.broadcast, meeting.gather)
        if plane is None:
            raise RuntimeError("no control plane")
    with phase("group"), nullcontext() if has_mesh(size) else connecting_when_needed():
        dist.init_process_group("gloo", store=meeting.store, rank=rank, world_size=size, timeout=_LIMIT)
    with phase("topology"):
        topology = connect_world(rank, size, Place(node, rank % ranks_per_node), timeout=_LIMIT)
    with phase("twin"):
        duplicate = topology.duplicate()
    with phase("agreements"):
        for group in (topology.inter, duplicate.inter):
            if group is not None:
                values = torch.full((1000,), float(rank))
                group.all_reduce(values).wait()
                if values[0] != sum(group.ranks):
                    raise RuntimeError(f"the sum over the inter-node group is wrong: {values[0]}")
    topology.world.barrier()  # whoever ends now takes nothing away from others
    plane.close()


def _handles() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- what is written -------------------------------------------------------------------------------------------------


def page(starts: Sequence[Start], crowds: Sequence[Crowd] = ()) -> str:
    """The tables, in Markdown."""
    lines = [
        "# Starting\n",
        "`python -m benchmarks startup`: forked ranks of one machine with"
        f" {os.cpu_count()} processors, over gloo. A start is the meeting (with the control plane), torch's default"
        " process group, the topology and a twin of it; DDP's, of as many other ranks, is that group, of which it"
        f" connects all ranks with each other, and a connection to the store. With more than {_largest_mesh()} ranks"
        " ours connect when they first have something to say to each other. Seconds are those of the slowest rank,"
        " processor seconds those of all ranks together; beyond is what a start takes beyond DDP's, as a share of"
        " that: below 0 it takes less.\n",
        "| ranks | per node | seconds: meeting | group | topology | twin | DDP's | beyond"
        " | processor seconds: all | DDP's | beyond |",
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
        "\nThe machine's load before each start (other work, too, if it is not near 0; then seconds mean little):"
        f" {', '.join(f'{start.load:.0f}' for start in starts)}.",
        "\nWords are keys that ranks name to the store; handles are open files of a rank, after each has agreed once in"
        " its lane of the topology and of the twin.\n",
        "| ranks | words | per rank | DDP's | per rank | handles of a rank | DDP's | beyond | of rank 0 | DDP's |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for start in starts:
        words, of_ddp = sum(start.words[phase] for phase in PHASES), start.words[DDP]
        lines.append(
            f"| {_titled(start)} | {words} | {words / start.ranks:.1f} | {of_ddp} | {of_ddp / start.ranks:.1f}"
            f" | {start.handles['agreements']} | {start.handles[DDP]} | {start.handles_beyond}"
            f" | {start.handles_of_rank_0['agreements']} | {start.handles_of_rank_0[DDP]} |"
        )
    if any(start.lazy_default_group for start in starts):
        lines.append("\nlazy: with `TORCH_GLOO_LAZY_INIT=1`, by which DDP's ranks, too, connect when needed.")
    for crowd in crowds:
        lines.append(
            f"\nThe control plane's hub with {crowd.ranks} ranks, which one process plays: all had joined after"
            f" {crowd.joined_seconds:.1f} s; a failure was on all of them after {crowd.failure_seconds:.2f} s; it took"
            f" {crowd.share_of_core:.1%} of a processor while nothing happened but heartbeats"
            f" ({crowd.watched_seconds:.0f} s), and {crowd.megabytes:.0f} MB at its most."
        )
    return "\n".join(lines) + "\n"


def _titled(start: Start) -> str:
    return f"{start.ranks}{' (lazy)' if start.lazy_default_group else ''}"


def _largest_mesh() -> int:
    return max(ranks for ranks in range(1, 4097) if has_mesh(ranks))


def add_arguments(parser: argparse.ArgumentParser, out: Path) -> None:
    """The command's arguments."""
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 32, 64])
    parser.add_argument("--hub", type=int, nargs="*", default=[], metavar="RANKS", help="play so many ranks of a hub")
    parser.add_argument("--ranks-per-node", type=int, default=4)
    parser.add_argument("--lazy", action="store_true", help="with TORCH_GLOO_LAZY_INIT=1 for all groups")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a start counts as hung")
    parser.add_argument("--out", type=Path, default=out, help="the folder that gets startup.json, .md and .png")
    parser.add_argument("--stored", action="store_true", help="only write the table and the picture again")


def command(arguments: argparse.Namespace) -> None:
    """Start as many ranks as asked for; each start is stored when it ends."""
    path = arguments.out / "startup.json"
    found, crowds = load(path)
    starts = {_name(start): start for start in found}

    def save() -> None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        ordered, played = [starts[name] for name in sorted(starts)], sorted(crowds, key=lambda crowd: crowd.ranks)
        stored = {"starts": [asdict(start) for start in ordered], "hubs": [asdict(crowd) for crowd in played]}
        path.write_text(json.dumps(stored, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(ordered, played))

    for ranks in () if arguments.stored else arguments.ranks:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if ranks > most // 2:
            sys.exit(f"{ranks} ranks want more than the {most} open files that this machine allows")
        start = measure(ranks, arguments.ranks_per_node, arguments.timeout, arguments.lazy)
        starts[_name(start)] = start
        save()
        print(page([start]), flush=True)
    for ranks in () if arguments.stored else arguments.hub:
        crowds = [crowd for crowd in crowds if crowd.ranks != ranks] + [measure_crowd(ranks)]
        save()
    if starts:
        from benchmarks import plots

        save()
        plots.startup([starts[name] for name in sorted(starts)], path.with_suffix(".png"))
    print(path.with_suffix(".md"))


def load(path: Path) -> tuple[list[Start], list[Crowd]]:
    """What is stored."""
    stored = json.loads(path.read_text()) if path.exists() else {"starts": [], "hubs": []}
    return [Start(**start) for start in stored["starts"]], [Crowd(**crowd) for crowd in stored["hubs"]]


def _name(start: Start) -> tuple[int, int, bool]:
    return start.ranks, start.ranks_per_node, start.lazy_default_group

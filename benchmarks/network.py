"""Nodes joined by a slow network, on one Linux machine.

Every node is a network namespace with one interface, ``eth0``. A veth pair leads from it to a bridge in a namespace of
its own, the switch. A token bucket (``tc tbf``) on both ends of the pair limits both directions, so a node sends and
receives at the given rate, at the same time. Ranks of one node talk over the namespace's ``lo``, which has no limit.

Namespaces need root and iproute2. Without them :class:`LoopbackNetwork` runs the same nodes over the machine's own
loopback: nothing is slow there, but the bytes are counted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

INTERFACE = "eth0"


@dataclass(frozen=True)
class Node:
    """One node: where it runs and what it is called there."""

    index: int
    namespace: str | None
    hostname: str
    address: str
    interface: str


def transmitted_bytes(interface: str) -> int:
    """Bytes the calling process's network namespace has sent over ``interface`` so far, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise LookupError(f"no network interface named {interface!r}")


def free_port() -> int:
    """Return a free port of this machine, which is also free on its namespaces."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def processor_time() -> tuple[int, int]:
    """Of all processors of this machine since it was started: the time, and how much of it they were busy; in ticks."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(fields), sum(fields) - fields[3] - fields[4]  # idle, and waiting for a disk


def busy_since(before: tuple[int, int]) -> float:
    """How busy all processors were since a :func:`processor_time`, of 1."""
    total, busy = processor_time()
    return (busy - before[1]) / max(1, total - before[0])


def busy_share(seconds: float = 1.0) -> float:
    """How busy all processors are at this moment: what else runs here spoils a measurement."""
    before = processor_time()
    time.sleep(seconds)
    return busy_since(before)


AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


@contextlib.contextmanager
def one_scheduling_group() -> Iterator[None]:
    """Inside, the kernel shares the processors among all threads alike, if we may tell it so.

    Else each rank is a group of its own, as it leads a session. Such groups do not move well between processors: of
    four ranks that trained on two, one had a twelfth of a processor for five seconds.
    """
    try:
        before = AUTOGROUP.read_text()
        AUTOGROUP.write_text("0")
    except OSError:  # there are no groups, or we are not root
        yield
        return
    try:
        yield
    finally:
        AUTOGROUP.write_text(before)


def why_no_namespaces() -> str | None:
    """The reason why this machine cannot make namespaces, or None when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            return f"'{tool}' is missing: apt-get install iproute2 util-linux"
    probe = f"hcprobe{os.getpid()}"
    try:
        command("ip", "netns", "add", probe)
    except subprocess.CalledProcessError as error:
        return f"'ip netns add' failed: {error.stderr.strip()}"
    command("ip", "netns", "del", probe)
    return None


def open_network(nodes: int, mtu: int = 1500) -> Network:
    """The best network this machine can make: namespaces, else loopback (:attr:`Network.note` has the reason)."""
    reason = why_no_namespaces()
    if reason is None:
        return NamespaceNetwork(nodes, mtu=mtu)
    return LoopbackNetwork(nodes, reason)


@dataclass
class Network:
    """Some nodes and the processes started on them. A context manager: leaving it ends what it started."""

    nodes: list[Node]
    note: str = ""
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def limits_rates(self) -> bool:
        """Whether :meth:`set_rate` has an effect."""
        return False

    def set_rate(self, mbit: float | None) -> None:
        """Limit every node to ``mbit`` Mbit/s in each direction; None removes the limit."""

    def start(
        self, node: Node, argv: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start a process on a node. Its output goes to ``output``."""
        process = subprocess.Popen(
            self._on_node(node, argv),
            env={**os.environ, **environment, "GLOO_SOCKET_IFNAME": node.interface},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def stop_processes(self, grace: float = 10.0) -> None:
        """End every process this network has started that still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + grace
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes.clear()

    def close(self) -> None:
        """End all processes and remove what was made."""
        self.stop_processes()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _on_node(self, node: Node, argv: Sequence[str]) -> list[str]:
        return list(argv)


class LoopbackNetwork(Network):
    """The fallback: all nodes share the machine's loopback, which has no rate limit."""

    def __init__(self, nodes: int, reason: str = "") -> None:
        note = "loopback, no rate limit; bytes are all of the machine's loopback traffic, intra-node included"
        super().__init__(
            [Node(index, None, f"node{index}", "127.0.0.1", "lo") for index in range(nodes)],
            note=f"{note} ({reason})" if reason else note,
        )


class NamespaceNetwork(Network):
    """Nodes as network namespaces around a switch; see the module's docstring."""

    def __init__(self, nodes: int, mtu: int = 1500) -> None:
        prefix = f"hc{os.getpid()}"
        super().__init__(
            [Node(i, f"{prefix}n{i}", f"node{i}", f"10.77.0.{i + 1}", INTERFACE) for i in range(nodes)],
            note=f"network namespaces, tbf in both directions, MTU {mtu}",
        )
        self._switch = f"{prefix}sw"
        self._mtu = mtu
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    @property
    def limits_rates(self) -> bool:
        return True

    def set_rate(self, mbit: float | None) -> None:
        for node in self.nodes:
            for namespace, interface in self.ends(node):
                if mbit is None:
                    command("tc", "-n", namespace, "qdisc", "del", "dev", interface, "root", check=False)
                else:
                    shape = ["rate", f"{mbit:g}mbit", "burst", str(burst_bytes(mbit)), "latency", "100ms"]
                    command("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf", *shape)

    def stop_processes(self, grace: float = 10.0) -> None:
        super().stop_processes(grace)
        # torchrun puts its workers into sessions of their own; whatever is still inside our namespaces is ours.
        for node in self.nodes:
            left = command("ip", "netns", "pids", str(node.namespace), check=False)
            for pid in left.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        self.stop_processes()
        for namespace in (*(str(node.namespace) for node in self.nodes), self._switch):
            command("ip", "netns", "del", namespace, check=False)
            shutil.rmtree(_hosts_folder(namespace), ignore_errors=True)

    def _build(self) -> None:
        command("ip", "netns", "add", self._switch)
        command("ip", "-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        command("ip", "-n", self._switch, "link", "set", "bridge0", "up", "mtu", str(self._mtu))
        hosts = "127.0.0.1 localhost\n" + "".join(f"{node.address} {node.hostname}\n" for node in self.nodes)
        for node in self.nodes:
            namespace, port = str(node.namespace), f"port{node.index}"
            command("ip", "netns", "add", namespace)
            peer = ["peer", "name", port, "netns", self._switch]
            command("ip", "link", "add", INTERFACE, "netns", namespace, "type", "veth", *peer)
            command("ip", "-n", self._switch, "link", "set", port, "master", "bridge0", "up", "mtu", str(self._mtu))
            command("ip", "-n", namespace, "link", "set", INTERFACE, "up", "mtu", str(self._mtu))
            command("ip", "-n", namespace, "link", "set", "lo", "up")
            command("ip", "-n", namespace, "addr", "add", f"{node.address}/24", "dev", INTERFACE)
            _hosts_folder(namespace).mkdir(parents=True)
            (_hosts_folder(namespace) / "hosts").write_text(hosts)

    def ends(self, node: Node) -> list[tuple[str, str]]:
        """Both ends of a node's cable, as (namespace, interface)."""
        return [(str(node.namespace), INTERFACE), (self._switch, f"port{node.index}")]

    def _on_node(self, node: Node, argv: Sequence[str]) -> list[str]:
        # A host name of its own in a UTS namespace: some libraries advertise the host name as their address.
        named = ["unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"', node.hostname]
        return ["ip", "netns", "exec", str(node.namespace), *named, *argv]


def burst_bytes(mbit: float) -> int:
    """Size of the token bucket: one millisecond of traffic, at least two of the largest packets (64 KiB each).

    The bucket is what a link that has been idle sends for nothing, so it is much smaller than any payload.
    """
    return max(131_072, int(mbit * 1e6 / 8 * 1e-3))


def _hosts_folder(namespace: str) -> Path:
    """``ip netns exec`` shows the files in this folder as if they were in ``/etc``."""
    return Path("/etc/netns") / namespace


def command(*argv: str, check: bool = True) -> str:
    return subprocess.run(argv, check=check, capture_output=True, text=True, timeout=30).stdout

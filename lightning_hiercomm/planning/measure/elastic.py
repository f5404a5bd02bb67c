"""Checks what elastic nodes will stand on, from one of them: the lighthouse, this node's address, and times."""

from __future__ import annotations

import os
import re
import socket
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from http.client import HTTPException
from importlib import metadata

from lightning_hiercomm.elastic.configuration import Elastic, check_torchft
from lightning_hiercomm.elastic.lighthouse import own_address
from lightning_hiercomm.planning.measure.doctor import Finding, interfaces

_KNOCKS = 5
_START = "start `python -m lightning_hiercomm lighthouse`, and open its port to all nodes"


def examine_elastic(
    lighthouse: str | None = None, dead_after: float | None = None, say: Callable[[str], None] = print
) -> int:
    """Check from this machine what a run whose nodes come and go needs; returns the exit status, 1 if it would fail.

    Args:
        lighthouse: Its ``"host:port"``. Default: ``HIERCOMM_LIGHTHOUSE``.
        dead_after: Of the run. If it is given, the lighthouse is asked to count a node as gone, which takes that long,
            and during which nodes that are there may have to wait.
        say: Takes each line.
    """
    status = 0
    for finding in _findings(lighthouse, dead_after, os.environ):
        say(str(finding))
        status |= finding.level == "FAIL"
    return int(status)


def _findings(given: str | None, dead_after: float | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    try:
        check_torchft()
        elastic = Elastic(dead_after=Elastic.dead_after if dead_after is None else dead_after, lighthouse=given)
        address = elastic.address()
    except (ModuleNotFoundError, ValueError) as error:
        yield Finding("FAIL", str(error))
        return
    yield Finding("ok", f"torchft {metadata.version('torchft')}")
    try:
        seconds = _round_trip(address)
        page = _status_page(address)
    except OSError as error:
        yield Finding("FAIL", f"no lighthouse answers at {address} ({error})", _START)
        return
    if "heartbeat" not in page.lower():
        yield Finding("FAIL", f"what answers at {address} is no lighthouse", _START)
        return
    yield reached(address, seconds, elastic.dead_after)
    yield own(environment.get("HIERCOMM_ADDRESS"), own_address(address), address, interfaces())
    name = environment.get("HIERCOMM_NODE")
    yield Finding("ok", f"this node is called {name or socket.gethostname()!r}" + ("" if name else ", as its host is"))
    if dead_after is not None:
        yield silence(dead_after, _silence_of(address, 3 * dead_after + 2.0))


def _round_trip(address: str) -> float:
    """Seconds of the fastest of a few connections."""
    host, _, port = address.rpartition(":")
    taken = []
    for _ in range(_KNOCKS):
        began = time.perf_counter()
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5.0):
            taken.append(time.perf_counter() - began)
    return min(taken)


def reached(address: str, seconds: float, dead_after: float) -> Finding:
    """Whether the lighthouse hears of a node often enough."""
    text = f"the lighthouse at {address} answers, {1e3 * seconds:.1f} ms away"
    if seconds > dead_after / 8:
        return Finding("FAIL", f"{text}, but beats of a node come every {dead_after / 8:.2g} s", "raise dead_after")
    return Finding("ok", text)


def own(given: str | None, towards: str, lighthouse: str, known: Mapping[str, str | None]) -> Finding:
    """Under which address other nodes will look for this one: for agreements, and to be healed.

    Args:
        given: ``HIERCOMM_ADDRESS``.
        towards: This machine's address on the way to the lighthouse.
        lighthouse: Its address.
        known: This machine's interfaces.
    """
    chosen = given or towards
    interface = next((name for name, address in known.items() if address == chosen), None)
    others = {name: address for name, address in known.items() if address and name not in ("lo", interface)}
    beside = f"; there are also {', '.join(f'{name} {address}' for name, address in others.items())}" if others else ""
    text = f"other nodes find this one, and parameters travel, at {chosen}{f' ({interface})' if interface else ''}"
    if given is not None and interface is None:
        shown = ", ".join(f"{name} {address}" for name, address in known.items() if address)
        return Finding("FAIL", f"HIERCOMM_ADDRESS={given} is of no interface of this machine: {shown}", "set it to one")
    if chosen.startswith("127.") and not lighthouse.startswith(("127.", "localhost")):
        return Finding("FAIL", f"{text}, where no other machine reaches it", "set HIERCOMM_ADDRESS")
    if chosen.startswith("127."):
        return Finding("note", f"{text}: all nodes have to be on this machine")
    if given is None and others:
        return Finding("note", f"{text}{beside}", "if one of those is faster, set HIERCOMM_ADDRESS to it, on all nodes")
    return Finding("ok", text)


def silence(dead_after: float, found: float | None) -> Finding:
    """Whether the lighthouse and the nodes mean the same by a node that is gone."""
    if found is None:
        return Finding("note", f"the lighthouse waits for longer than {3 * dead_after:g} s for a node that is silent")
    if not 0.6 * dead_after < found < 1.5 * dead_after + 0.5:
        return Finding(
            "FAIL",
            f"the lighthouse counts a node as gone after {found:.1f} s, but the run says dead_after={dead_after:g}",
            f"start it with --dead-after {dead_after:g}",
        )
    return Finding("ok", f"the lighthouse counts a node as gone after {found:.1f} s, as dead_after={dead_after:g} says")


def _status_page(address: str) -> str:
    """Return torchft's page for people, which is the only way to its list of nodes; raises an ``OSError``."""
    try:
        with urllib.request.urlopen(f"http://{address}/status", timeout=5.0) as page:
            text: str = page.read().decode()
    except (HTTPException, UnicodeDecodeError) as error:  # it is another program's port
        raise OSError(f"it answers {str(error).strip()!r}") from error
    return text


def _silence_of(address: str, timeout: float) -> float | None:
    """Measure after how many seconds of silence the lighthouse lists a node as lost."""
    from torchft.coordination import LighthouseClient

    name = f"doctor-{uuid.uuid4().hex[:8]}"
    LighthouseClient(f"http://{address}", timedelta(seconds=5)).heartbeat(name)
    began = time.monotonic()
    while time.monotonic() - began < timeout:
        if re.search(rf"heartbeat\s+old[^>]*>\s*\S*{name}", _status_page(address)):
            return time.monotonic() - began
        time.sleep(0.05)
    return None

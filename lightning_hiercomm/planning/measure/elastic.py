"""Check the lighthouse and this node's address before an elastic run."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from importlib import metadata

from lightning_hiercomm.elastic.configuration import Elastic, check_torchft
from lightning_hiercomm.elastic.lighthouse import own_address
from lightning_hiercomm.planning.measure.doctor import Finding, interfaces
from lightning_hiercomm.planning.measure.round_trip import connect_seconds

_START = "start `python -m lightning_hiercomm lighthouse`, and open its port to all nodes"


def examine_elastic(lighthouse: str | None = None) -> int:
    """Check this machine for an elastic run; return the exit status, 1 if the run would fail."""
    status = 0
    for finding in _findings(lighthouse, os.environ):
        print(finding)
        status |= finding.level == "FAIL"
    return int(status)


def _findings(given: str | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    try:
        check_torchft()
        address = Elastic(lighthouse=given).address()
    except (ModuleNotFoundError, ValueError) as error:
        yield Finding("FAIL", str(error))
        return
    yield Finding("ok", f"torchft {metadata.version('torchft')}")
    try:
        host, _, port = address.rpartition(":")
        seconds = connect_seconds(host.strip("[]"), int(port))
        with urllib.request.urlopen(f"http://{address}/status", timeout=5.0) as page:
            is_lighthouse = "heartbeat" in page.read().decode(errors="replace").lower()
    except (OSError, HTTPException) as error:
        yield Finding("FAIL", f"no lighthouse answers at {address} ({str(error).strip()})", _START)
        return
    if not is_lighthouse:
        yield Finding("FAIL", f"the server at {address} is not a lighthouse", _START)
        return
    yield Finding("ok", f"the lighthouse at {address} answers, {1e3 * seconds:.1f} ms away")
    yield own(environment.get("HIERCOMM_ADDRESS"), own_address(address), address, interfaces())
    name = environment.get("HIERCOMM_NODE")
    yield Finding("ok", f"this node's name is {name or socket.gethostname()!r}" + ("" if name else ", its host name"))


def own(given: str | None, towards: str, lighthouse: str, known: Mapping[str, str | None]) -> Finding:
    """Check the address at which other nodes connect to this one, for synchronization and healing.

    Args:
        given: ``HIERCOMM_ADDRESS``.
        towards: This machine's address on the route to the lighthouse.
        lighthouse: The lighthouse's address.
        known: This machine's interfaces with their addresses.
    """
    chosen = given or towards
    interface = next((name for name, address in known.items() if address == chosen), None)
    others = {name: address for name, address in known.items() if address and name not in ("lo", interface)}
    text = f"other nodes connect to this one at {chosen}{f' ({interface})' if interface else ''}"
    if given is not None and interface is None:
        shown = ", ".join(f"{name} {address}" for name, address in known.items() if address)
        return Finding("FAIL", f"HIERCOMM_ADDRESS={given} is of no interface of this machine: {shown}", "set it to one")
    if chosen.startswith("127.") and not lighthouse.startswith(("127.", "localhost")):
        return Finding("FAIL", f"{text}, which no other machine reaches", "set HIERCOMM_ADDRESS")
    if chosen.startswith("127."):
        return Finding("note", f"{text}: all nodes must be on this machine")
    if given is None and others:
        also = ", ".join(f"{name} {address}" for name, address in others.items())
        return Finding("note", f"{text}; there are also {also}", "if one is faster, set HIERCOMM_ADDRESS to it")
    return Finding("ok", text)

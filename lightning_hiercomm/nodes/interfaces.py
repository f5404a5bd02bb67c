"""The network interface that gloo uses, where the host name does not lead to one that other machines reach."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

VARIABLE = "GLOO_SOCKET_IFNAME"


def interfaces() -> dict[str, str | None]:
    """Return this machine's network interfaces with their IPv4 addresses."""
    return {name: _address_of(name) for _, name in socket.if_nameindex()}


def _address_of(name: str) -> str | None:
    if sys.platform != "linux":
        return None
    request_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), request_address, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def resolved(name: str) -> str | None:
    """Return the IPv4 address of a host name; None if it has none."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def address_towards(host: str) -> str | None:
    """Return this machine's IPv4 address on the route to another one; None if that is the loopback."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # of a datagram socket: sends nothing
        address = str(probe.getsockname()[0])
        return None if address.startswith("127.") else address
    return None


def use_reachable_interface(main_address: str, gather: Callable[[Any], list[Any]] = lambda own: [own]) -> str | None:
    """Set ``GLOO_SOCKET_IFNAME`` where gloo would take the loopback, although other machines take part; collective.

    gloo listens at the address of the host name, which Debian and Ubuntu put at 127.0.1.1. The interface towards rank 0
    is right instead; on rank 0 itself, that towards another rank. A variable that is set stays as it is.

    Args:
        main_address: Rank 0's address.
        gather: Returns the values of all ranks. Default: this rank decides alone, which fails on rank 0 if
            ``main_address`` is its own host name.

    Returns:
        A sentence on what was set, and why; None if nothing was.
    """
    towards_main = address_towards(main_address)
    everyone = gather(towards_main or "")
    host = socket.gethostname()
    named, known = resolved(host), interfaces()
    if os.environ.get(VARIABLE) or (named in known.values() and not str(named).startswith("127.")):
        return None
    peers = [address for address in everyone if address]
    own = towards_main or next(filter(None, map(address_towards, peers)), None)
    chosen = next((name for name, address in known.items() if address == own), None)
    if own is None or chosen is None:
        return None
    os.environ[VARIABLE] = chosen
    why = "does not resolve" if named is None else f"is {named}"
    return f"gloo uses the interface {chosen} ({own}) towards the other ranks, because the host name {host} {why}"

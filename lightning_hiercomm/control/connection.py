"""Starts the hub's process on rank 0, and connects ranks to it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from lightning_hiercomm.control import hub, process

_JOIN_SECONDS = 20.0
_BACKLOG = 4096  # all ranks connect at once; the kernel limits this to net.core.somaxconn


@dataclass(frozen=True)
class Invitation:
    """The address on which rank 0 listens, and the token; sent to every rank once, over the collectives."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class HubLink:
    """Connects this rank to the hub; rank 0 also owns the hub's listening socket and starts its process."""

    def __init__(self, rank: int, size: int, place: str, hang_timeout: float | None) -> None:
        self.rank = rank
        self.place = place
        self._settings = {"size": size, "hang_timeout": hang_timeout}
        self._ends_on_urgent_data = hang_timeout is not None
        self.listener: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def invite(self, host: str, port: int = 0) -> Invitation:
        """Start the hub (rank 0 only), or raise an ``OSError`` if the port is taken; 0 is any free port."""
        self.listener = listen_on(host, port)
        invitation = Invitation(host, self.listener.getsockname()[1], secrets.token_hex(16))
        self.process = start_hub(self.listener, token=invitation.token, **self._settings)
        return invitation

    def connect(self, invitation: Invitation, timeout: float) -> socket.socket:
        return connect(invitation, timeout, self.listener)

    def join(self, invitation: Invitation) -> tuple[hub.Channel, list[hub.Message]]:
        """Return the channel and its first messages, or raise an ``OSError`` if the hub cannot be reached."""
        deadline = time.monotonic() + _JOIN_SECONDS
        while True:
            try:
                connection = self.connect(invitation, max(0.1, deadline - time.monotonic()))
                link = authenticate(connection, invitation.token, self.rank, self.place)
                break
            except (ConnectionResetError, BrokenPipeError):
                # the hub drops the oldest of too many unknown connections, which may have been this one
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        if self._ends_on_urgent_data:
            process.end_on_urgent_data(connection)
        return link

    def close(self) -> None:
        """Wait a moment for the hub, which ends when rank 0 has left, and stop listening."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.communicate(timeout=2.0)
            self.process = None
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    def forget(self) -> None:
        """Close in a forked child what it has inherited."""
        if self.listener is not None:
            self.listener.close()
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()


def listen_on(host: str, port: int) -> socket.socket:
    """Listen on the address that the ranks use, or on all addresses if it is not one of this machine."""
    with contextlib.suppress(socket.gaierror):
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            if ipaddress.ip_address(address[0]).is_loopback and host not in (address[0], "localhost"):
                continue  # Debian's /etc/hosts maps a machine's own name to a loopback address
            try:
                return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def start_hub(listener: socket.socket, **settings: Any) -> subprocess.Popen[bytes]:
    """Start a hub that accepts connections of ``listener``; ``settings`` are the arguments of :class:`hub.Hub`."""
    # in a separate session, because signals for rank 0 and its children must not end it
    command = [sys.executable, "-I", "-S", hub.__file__]
    handle = listener.fileno()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[handle], start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(json.dumps({"listener": handle, **settings}).encode() + b"\n")
    process.stdin.flush()
    return process


def connect(invitation: Invitation, timeout: float, listener: socket.socket | None = None) -> socket.socket:
    """Connect to the address of the hub, on rank 0 through its ``listener``, or raise an ``OSError``."""
    host, port = invitation.host, invitation.port
    if listener is not None:  # rank 0 may not reach its own public address
        host, port = listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = socket.create_connection((host, port), timeout)
    hub.probe_peer(connection)
    return connection


def authenticate(connection: socket.socket, token: str, rank: int, place: str) -> tuple[hub.Channel, list[hub.Message]]:
    """Return the channel and the messages after the hub's welcome, or raise an ``OSError`` if it is not the hub."""
    channel = hub.Channel(connection)
    messages: list[hub.Message] = []

    def expect(kind: str) -> hub.Message:
        while not messages:
            messages.extend(channel.receive())
        message = messages.pop(0)
        if message["kind"] != kind:
            raise ValueError(f"expected a {kind}")
        return message

    try:
        nonce = str(expect("challenge").get("nonce"))
        channel.send({"kind": "hello", "rank": rank, "place": place, "proof": hub.proof(token, nonce, rank)})
        expect("welcome")
    except ValueError as error:
        channel.close()
        raise OSError("the server at this address is not the control plane's hub") from error
    except OSError:
        channel.close()
        raise
    connection.settimeout(None)
    return channel, messages

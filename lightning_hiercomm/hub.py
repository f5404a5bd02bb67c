"""The middle of the control plane's star, as a program: ``python hub.py SIZE`` with the token on standard input.

A process of its own, because it must outlive the ranks: where a launcher kills all of them as soon as one dies (MPICH's
``mpiexec`` does, and names an innocent one), it is the only one left to say which. It imports nothing but the standard
library, so it is there in a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import socket
import sys
from typing import Any

Message = dict[str, Any]


class Lines:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


def send(connection: socket.socket, message: Message) -> None:
    """Write one message."""
    connection.sendall(json.dumps(message).encode() + b"\n")


class Hub:
    """Passes messages on between the members, and tells them who died.

    Args:
        size: The number of ranks that will join.
        token: What a connection must say to be taken for a rank.
    """

    def __init__(self, size: int, token: str) -> None:
        self._size = size
        self._token = token
        self._server = socket.create_server(("", 0), backlog=size)
        self.port: int = self._server.getsockname()[1]
        self._members: dict[socket.socket, tuple[int, str]] = {}
        self._lines: dict[socket.socket, Lines] = {}
        self._holds: dict[int, int] = {}
        self._proposed = False
        self._has_failed = False
        self._ends = False
        self._selector = selectors.DefaultSelector()

    def serve(self, parent: int) -> None:
        """Work until rank 0 leaves, or everybody has gone.

        Args:
            parent: A file descriptor that rank 0's process holds open.
        """
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(parent, selectors.EVENT_READ)
        parent_lives = True
        while not self._ends and (parent_lives or self._members):
            for key, _ in self._selector.select():
                if key.fd == parent:
                    parent_lives = False
                    self._selector.unregister(parent)
                elif key.fileobj is self._server:
                    connection, _ = self._server.accept()
                    self._lines[connection] = Lines()
                    self._selector.register(connection, selectors.EVENT_READ)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)
        self._tell_all({"kind": "closed"})

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        for message in self._lines[connection].feed(data):
            if connection not in self._members:
                if message.get("kind") != "hello" or message.get("token") != self._token:
                    self._drop(connection)
                    return
                self._members[connection] = (message["rank"], message["place"])
            elif not self._handle(connection, message):
                rank, _ = self._members.pop(connection)
                self._ends |= rank == 0
                self._drop(connection)
                return

    def _handle(self, connection: socket.socket, message: Message) -> bool:
        """Act on a member's message; False if it leaves."""
        rank, _ = self._members[connection]
        if message["kind"] == "bye":
            return False
        if message["kind"] == "failed":
            self._has_failed = True
            self._tell_all(message)
        elif message["kind"] == "stop" and not self._proposed:
            self._proposed = True
            self._tell_all({"kind": "propose"})
        elif message["kind"] == "hold":
            self._holds[rank] = message["at"]
            if len(self._holds) == self._size:
                self._tell_all({"kind": "stop_at", "at": max(self._holds.values())})
        return True

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        self._lines.pop(connection, None)
        member = self._members.pop(connection, None)
        if member is None:
            return
        if not self._has_failed:
            print(f"lightning_hiercomm: {member[1]} died", file=sys.stderr, flush=True)
        self._has_failed = True
        self._tell_all({"kind": "failed", "message": f"{member[1]} died"})

    def _tell_all(self, message: Message) -> None:
        for connection in self._members:
            with contextlib.suppress(OSError):
                send(connection, message)


def main() -> None:
    """Print the port, and serve."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # meant for the ranks, who end in their own time
        signal.signal(number, signal.SIG_IGN)
    hub = Hub(size=int(sys.argv[1]), token=sys.stdin.readline().strip())
    print(hub.port, flush=True)
    hub.serve(parent=sys.stdin.fileno())


if __name__ == "__main__":
    main()

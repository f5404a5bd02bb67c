"""The middle of the control plane's star, as a program: ``python hub.py`` with its settings on standard input.

A process of its own, because it must outlive the ranks: where a launcher kills all of them as soon as one dies (MPICH's
``mpiexec`` does, and names an innocent one), it is the only one left to say which. It imports nothing but the standard
library, so it is there in a few hundredths of a second.

Anybody can connect to a port. Until a connection has shown that it knows the token it is a stranger: it gets a few
kilobytes, a few seconds and one of a few dozen places, and nothing that it sends does more than end itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

MAX_MESSAGE = 16 * 1024  # bytes
MAX_STRANGERS = 64
STRANGER_BYTES = 4 * 1024
STRANGER_SECONDS = 5.0


def proof(token: str, nonce: str, rank: int) -> str:
    """What shows that ``rank`` knows the token, without saying it."""
    return hmac.new(token.encode(), f"{nonce} {rank}".encode(), hashlib.sha256).hexdigest()


class Channel:
    """Messages over a connection: one JSON object a line.

    Args:
        connection: A connected socket.
        limit: How many bytes may be kept of a message whose end has not arrived.
    """

    def __init__(self, connection: socket.socket, limit: int = MAX_MESSAGE) -> None:
        self.limit = limit
        self._connection = connection
        self._rest = b""

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Write one message.

        Raises:
            OSError: If the connection is gone, or the peer has let very much pile up.
        """
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # perhaps after half of it: nobody could read on
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            raise

    def receive(self) -> list[Message]:
        """What has arrived; none if the end of a message is still missing.

        Raises:
            OSError: If the connection is gone.
            ValueError: If what has arrived is no message, or is too long for one.
        """
        data = self._connection.recv(4096)
        if not data:
            raise ConnectionResetError("closed by the peer")
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self.limit:
            raise ValueError("a message without end")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("not a message") from error
        if not all(isinstance(message, dict) and isinstance(message.get("kind"), str) for message in messages):
            raise ValueError("not a message")
        return messages

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@dataclass(frozen=True)
class Stranger:
    """A connection that has not shown yet who it is."""

    nonce: str
    deadline: float


@dataclass(frozen=True)
class Member:
    """A rank."""

    rank: int
    place: str


class Hub:
    """Passes messages on between the members, and tells them who died.

    Args:
        listener: A listening socket.
        size: The number of ranks that will join.
        token: What a connection must know to be taken for a rank.
    """

    def __init__(self, listener: socket.socket, size: int, token: str) -> None:
        listener.setblocking(False)  # who knocked may be gone when we open
        self._listener = listener
        self._size = size
        self._token = token
        self._strangers: dict[Channel, Stranger] = {}  # the oldest first
        self._members: dict[Channel, Member] = {}
        self._missing = set(range(size))  # who has not joined yet
        self._holds: dict[int, int] = {}
        self._proposed = False
        self._failure: Message | None = None
        self._ends = False
        self._selector = selectors.DefaultSelector()

    def serve(self, parent: int) -> None:
        """Work until rank 0 leaves, or everybody has gone.

        Args:
            parent: A file descriptor that rank 0's process holds open.
        """
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(parent, selectors.EVENT_READ)
        parent_lives = True
        while not self._ends and (parent_lives or self._members):
            for key, _ in self._selector.select(timeout=1.0):
                if key.fd == parent:
                    parent_lives = False
                    self._selector.unregister(parent)
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, Channel):
                    self._hear(key.fileobj)
            now = time.monotonic()
            for channel in [channel for channel, stranger in self._strangers.items() if stranger.deadline < now]:
                self._drop(channel)
        self._tell_all({"kind": "closed"})

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # most likely there are no file descriptors left
            if self._strangers:
                self._drop_oldest_stranger()
            else:
                time.sleep(0.05)
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._drop_oldest_stranger()
        connection.setblocking(False)  # nobody makes the hub wait
        channel = Channel(connection, limit=STRANGER_BYTES)
        stranger = Stranger(secrets.token_hex(16), time.monotonic() + STRANGER_SECONDS)
        self._strangers[channel] = stranger
        self._selector.register(channel, selectors.EVENT_READ)
        self._tell(channel, {"kind": "challenge", "nonce": stranger.nonce})

    def _hear(self, channel: Channel) -> None:
        if channel not in self._members and channel not in self._strangers:
            return  # dropped since it had something to say
        try:
            messages = channel.receive()
        except (OSError, ValueError):
            self._drop(channel)
            return
        for message in messages:
            if channel in self._strangers:
                self._admit(channel, message)
            elif channel in self._members:
                try:
                    self._handle(channel, message)
                except (KeyError, TypeError):
                    self._drop(channel)

    def _admit(self, channel: Channel, hello: Message) -> None:
        """Make a stranger a member, if its first message shows that it is a rank."""
        kind, rank, place, shown = (hello.get(name) for name in ("kind", "rank", "place", "proof"))
        stranger = self._strangers[channel]
        if (
            kind == "hello"
            and type(rank) is int
            and isinstance(place, str)
            and isinstance(shown, str)
            and hmac.compare_digest(shown.encode(), proof(self._token, stranger.nonce, rank).encode())
            and rank not in [member.rank for member in self._members.values()]
        ):
            del self._strangers[channel]
            self._members[channel] = Member(rank, place)
            self._missing.discard(rank)
            channel.limit = MAX_MESSAGE
            self._tell(channel, {"kind": "welcome"})
            if self._failure is not None:
                self._tell(channel, self._failure)
            if self._proposed:
                self._tell(channel, {"kind": "propose"})
        else:
            self._drop(channel)

    def _handle(self, channel: Channel, message: Message) -> None:
        """Act on a member's message."""
        rank = self._members[channel].rank
        if message["kind"] == "bye":
            del self._members[channel]
            self._ends |= rank == 0
            self._drop(channel)
        elif message["kind"] == "failed":
            self._failure = self._failure or message
            self._tell_all(message)
        elif message["kind"] == "stop" and not self._proposed:
            self._proposed = True
            self._tell_all({"kind": "propose"})
        elif message["kind"] == "hold":
            self._holds[rank] = message["at"]
            if len(self._holds) == self._size:
                self._tell_all({"kind": "stop_at", "at": max(self._holds.values())})

    def _drop_oldest_stranger(self) -> None:
        self._drop(next(iter(self._strangers)))

    def _drop(self, channel: Channel) -> None:
        self._selector.unregister(channel)
        channel.close()
        self._strangers.pop(channel, None)
        member = self._members.pop(channel, None)
        if member is None:
            return
        message = f"{member.place} died"
        if self._missing:  # a launcher that ends everybody because of them is quicker than their absence
            message += f" while rank {', '.join(map(str, sorted(self._missing)[:10]))} had not come yet"
        failure = {"kind": "failed", "message": message}
        if self._failure is None:
            print(f"lightning_hiercomm: {message}", file=sys.stderr, flush=True)
            self._failure = failure
        self._tell_all(failure)

    def _tell_all(self, message: Message) -> None:
        for channel in self._members:
            self._tell(channel, message)

    def _tell(self, channel: Channel, message: Message) -> None:
        with contextlib.suppress(OSError):  # if it is gone, reading from it will say so
            channel.send(message)


def main() -> None:
    """Serve, on the listening socket that is inherited."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # meant for the ranks, who end in their own time
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    listener = socket.socket(fileno=settings["listener"])
    Hub(listener, settings["size"], settings["token"]).serve(parent=sys.stdin.fileno())


if __name__ == "__main__":
    main()

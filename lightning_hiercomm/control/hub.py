"""The control plane's hub, as a program: ``python hub.py`` with its settings on standard input.

It is a separate process because it must outlive the ranks: some launchers kill all ranks as soon as one dies (MPICH's
``mpiexec`` does, and names another one), and then only the hub can report which rank died first. It imports only the
standard library, so that it starts in a few hundredths of a second.

Anybody can connect to a port. Until a connection has proved that it knows the token, it is a stranger, with limits on
its memory, its time and the number of such connections.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import resource
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

Message = dict[str, Any]

MAX_MESSAGE = 16 * 1024  # bytes
MAX_STRANGERS = 64  # plus one per rank that has not connected yet
STRANGER_BYTES = 4 * 1024
STRANGER_SECONDS = 5.0
UNREACHABLE_SECONDS = 30
AFTERMATH_SECONDS = 60.0
BEATS_PER_SECOND = 500  # of all ranks together: a few hundredths of a core
ACCEPTED_AT_ONCE = 64
_EQUAL_BATCHES = "All ranks must take equally many steps: give them equally many batches, or set limit_train_batches"
_EQUAL_STEPS = (
    f"{_EQUAL_BATCHES}, and in manual optimization call optimizer.step() equally often. A loop that stops early, by"
    " a KL divergence for instance, must stop on all ranks alike:"
    " trainer.strategy.reduce_boolean_decision(kl > limit, all=False)"
)
_STOP_ON_ALL_RANKS = (
    f"{_EQUAL_BATCHES}. If trainer.should_stop was set on some ranks only, set it on all ranks alike, for instance with"
    " trainer.strategy.reduce_boolean_decision(...)"
)
_SAVE_ON_ALL_RANKS = "Call trainer.save_checkpoint on all ranks; only rank 0 writes the file"
Purpose = Literal["run", "average", "save", "reduce", "epoch", "end"]
_PURPOSES: dict[Purpose, tuple[str, str]] = {
    "run": ("called", "Call trainer.fit, validate, test and predict on all ranks alike"),
    "reduce": ("reduced a value", "Call self.log(..., sync_dist=True) and strategy.reduce on all ranks alike"),
    "save": ("called trainer.save_checkpoint", _SAVE_ON_ALL_RANKS),
    "end": ("ended training", _STOP_ON_ALL_RANKS),
    "epoch": ("ended an epoch", _EQUAL_BATCHES),
    "average": ("asked for the averaged model", "All ranks must do that after equally many steps"),
}
"""Why ranks wait at a barrier: what a rank did, and the remedy if others did not."""


def seconds_between_beats(size: int, hang_timeout: float) -> float:
    """Return the interval between reports of each rank, which grows with the number of ranks."""
    return min(max(1.0, size / BEATS_PER_SECOND), hang_timeout / 10)


def proof(token: str, nonce: str, rank: int) -> str:
    """Return an HMAC that proves that ``rank`` knows the token."""
    return hmac.new(token.encode(), f"{nonce} {rank}".encode(), hashlib.sha256).hexdigest()


class Channel:
    """Sends and receives messages, each a JSON object on one line."""

    def __init__(self, connection: socket.socket, limit: int = MAX_MESSAGE) -> None:
        self.limit = limit  # bytes of an incomplete message
        self._connection = connection
        self._rest = b""

    def fileno(self) -> int:
        """Return the socket's file descriptor, for selectors."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Write one message, or raise an ``OSError`` if the connection is closed or the peer does not read."""
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # half of the message may have been sent
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            raise

    def send_urgently(self) -> None:
        """Send urgent data, which ends a peer that does not read."""
        with contextlib.suppress(OSError):
            self._connection.send(b"!", socket.MSG_OOB)

    def receive(self) -> list[Message]:
        """Return the complete messages that have arrived.

        Raises:
            OSError: If the connection is closed.
            ValueError: If the data is no message, or too long.
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


class Stranger(NamedTuple):
    """A connection that has not authenticated yet."""

    nonce: str
    deadline: float


class RankStatus:
    """A connected rank, with its last report; no dataclass, whose import takes a third of this program's start."""

    def __init__(self, rank: int, place: str, reported_at: float) -> None:
        self.rank = rank
        self.place = place
        self.reported_at = reported_at
        self.doing = "joining"
        self.progress = 0
        self.stuck: tuple[str, float] = ("", 0.0)
        self.batches = 0  # begun
        self.wait: Message | None = None  # of its main thread for other ranks, as in waiting.Wait
        self.line = ""  # of the user's code that its main thread runs
        self.arrival: Message | None = None  # at its last barrier
        self.barriers = 0  # the number of barriers at which it has arrived


class Hub:
    """Forwards messages between ranks, and reports failures.

    Args:
        listener: A listening socket.
        size: The number of ranks that will connect.
        token: The secret by which ranks authenticate.
        hang_timeout: Seconds without a message after which a rank counts as frozen; None: never.
    """

    def __init__(self, listener: socket.socket, size: int, token: str, hang_timeout: float | None = None) -> None:
        listener.setblocking(False)  # a connection may be closed before it is accepted
        self._listener = listener
        self._size = size
        self._token = token
        self.strangers: dict[Channel, Stranger] = {}  # the oldest first
        self.members: dict[Channel, RankStatus] = {}
        self._joined: dict[int, Channel] = {}
        self.missing = {*range(size)}  # ranks that have not connected yet
        self._hang_timeout = hang_timeout
        self._checked_at = time.monotonic()
        self._progressed_at = time.monotonic()
        self._all_silent = False
        self._progress: dict[int, int] = {}
        self._standstill_reported = False
        self.released = 0  # the number of the last barrier that all ranks have passed
        self._arrived: set[int] = set()  # ranks that wait at a later one
        self._left: list[str] = []  # names of the ranks that have ended their run
        self._holds: dict[int, dict[int, int]] = {}  # by round: 0 is the stop, others are requeues; and by rank
        self._proposals: dict[int, Message] = {}
        self._failure: Message | None = None
        self._ends_at = math.inf
        self._selector = selectors.DefaultSelector()

    def serve(self, parent: int) -> None:
        """Run until rank 0 leaves, or all connections and ``parent``, rank 0's end of a pipe, are closed."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(parent, selectors.EVENT_READ)
        parent_lives = True
        pause = min(1.0, (self._hang_timeout or 10.0) / 10)
        checks_at = 0.0  # not after each message, because a check goes over all ranks
        while time.monotonic() < self._ends_at and (parent_lives or self.members):
            for key, _ in self._selector.select(timeout=pause):
                if key.fd == parent:
                    parent_lives = False
                    self._selector.unregister(parent)
                elif key.fileobj is self._listener:
                    for _ in range(ACCEPTED_AT_ONCE):
                        if not self._accept():
                            break
                elif isinstance(key.fileobj, Channel):
                    self._receive(key.fileobj)
            if time.monotonic() >= checks_at:
                self._check_all(time.monotonic())
                checks_at = time.monotonic() + pause / 2
        self._send_to_all({"kind": "closed"})

    def _accept(self) -> bool:
        """Accept a connection; return whether there may be more."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return False
        except OSError:  # most likely too many open files
            if self.strangers:
                self._drop_oldest_stranger()
            else:
                time.sleep(0.05)
            return False
        if len(self.strangers) >= MAX_STRANGERS + len(self.missing):
            self._drop_oldest_stranger()
        connection.setblocking(False)  # no peer may block the hub
        probe_peer(connection)
        channel = Channel(connection, limit=STRANGER_BYTES)
        stranger = Stranger(secrets.token_hex(16), time.monotonic() + STRANGER_SECONDS)
        self.strangers[channel] = stranger
        self._selector.register(channel, selectors.EVENT_READ)
        self._send(channel, {"kind": "challenge", "nonce": stranger.nonce})
        return True

    def _receive(self, channel: Channel) -> None:
        if channel not in self.members and channel not in self.strangers:
            return  # dropped meanwhile
        try:
            messages = channel.receive()
        except (OSError, ValueError):
            self._drop(channel)
            return
        if channel in self.members:
            self.members[channel].reported_at = time.monotonic()
        for message in messages:
            if channel in self.strangers:
                self._admit(channel, message)
            elif channel in self.members:
                try:
                    self.handle(channel, message)
                except (KeyError, TypeError, ValueError):
                    self._drop(channel)

    def _admit(self, channel: Channel, hello: Message) -> None:
        """Make a stranger a member if its first message proves that it is a rank; otherwise drop it."""
        kind, rank, place, shown = (hello.get(name) for name in ("kind", "rank", "place", "proof"))
        stranger = self.strangers[channel]
        if (
            kind == "hello"
            and type(rank) is int
            and isinstance(place, str)
            and isinstance(shown, str)
            and hmac.compare_digest(shown.encode(), proof(self._token, stranger.nonce, rank).encode())
            and rank not in self._joined
        ):
            del self.strangers[channel]
            self.members[channel] = RankStatus(rank, place, time.monotonic())
            self._joined[rank] = channel
            self.missing.discard(rank)
            channel.limit = MAX_MESSAGE
            self._send(channel, {"kind": "welcome"})
            if self._failure is not None:
                self._send(channel, self._failure)
            for proposal in self._proposals.values():
                self._send(channel, proposal)
        else:
            self._drop(channel)

    def handle(self, channel: Channel, message: Message) -> None:
        """Act on a member's message."""
        member = self.members[channel]
        rank = member.rank
        if message["kind"] == "bye":
            self._left.append(member.place)
            del self.members[channel], self._joined[rank]
            self._drop(channel)
            if rank == 0:
                self._ends_at = 0.0
        elif message["kind"] == "beat":
            member.doing, member.stuck, member.progress = message["doing"], message["stuck"], message["progress"]
            member.batches, member.wait, member.line = message["batches"], message["wait"], message["line"]
        elif message["kind"] == "arrive":
            member.arrival, member.barriers = message, int(message["number"])
            if member.barriers > self.released:
                self._arrived.add(rank)
            self._release()
        elif message["kind"] == "failed":
            self._fail(message)
        elif message["kind"] == "request":
            self._propose(int(message["round"]))
        elif message["kind"] == "hold":
            round_ = int(message["round"])
            holds = self._holds.setdefault(round_, {})
            holds[rank] = message["at"]
            if len(holds) == self._size:
                self._send_to_all({"kind": "stop_at", "at": max(holds.values()), "round": round_})
                if round_:  # they train on from there
                    self._proposals.pop(round_, None)

    def _release(self) -> None:
        if self.missing or self._left or len(self._arrived) < len(self.members):
            return
        number = min(member.barriers for member in self.members.values())
        arrivals = [(m, m.arrival) for m in self.members.values() if m.barriers == number and m.arrival is not None]
        difference = _difference(arrivals)
        if difference is not None:
            self._fail_of_itself(difference)
            return
        self.released = number
        self._arrived = {member.rank for member in self.members.values() if member.barriers > number}
        self._send_to_all({"kind": "release", "number": number})

    def _propose(self, round_: int) -> None:
        if round_ not in self._proposals and len(self._holds.get(round_, {})) < self._size:
            self._proposals[round_] = {"kind": "propose", "round": round_}
            self._send_to_all(self._proposals[round_])

    def _drop_oldest_stranger(self) -> None:
        self._drop(next(iter(self.strangers)))

    def _drop(self, channel: Channel) -> None:
        self._selector.unregister(channel)
        channel.close()
        self.strangers.pop(channel, None)
        member = self.members.pop(channel, None)
        if member is None:
            return
        del self._joined[member.rank]
        message = f"{member.place} died"
        if self.missing:  # a launcher may have ended all ranks because of these
            message += f" while {names_of_ranks(self.missing)} had not come yet"
        self._fail_of_itself(message)

    def _fail(self, failure: Message) -> None:
        """Report the first failure to all ranks; later ones are its consequences."""
        if self._failure is None:
            self._failure = failure
            self._ends_at = time.monotonic() + AFTERMATH_SECONDS  # the last rank may be frozen and never leave
            self._send_to_all(failure)

    def _fail_of_itself(self, message: str, **more: object) -> None:
        """Print and report a failure that no rank has reported."""
        if self._failure is None:
            print(f"lightning_hiercomm: {message}", file=sys.stderr, flush=True)
        self._fail({"kind": "failed", "message": message, **more})

    # ---- silent ranks, and ranks that make no progress -----------------------------------------------------------

    def _check_all(self, now: float) -> None:
        if now - self._checked_at > 5.0:  # the hub was stopped, perhaps together with all ranks
            self._reset_silence(now)
        self._checked_at = now
        for channel in [channel for channel, stranger in self.strangers.items() if stranger.deadline < now]:
            self._drop(channel)
        if self._failure is None:
            self._check_for_broken_barrier()
        if self._failure is None and self._hang_timeout is not None:
            self._check_for_frozen(now, self._hang_timeout)
            self._check_for_deadlock(self._hang_timeout)
            self._check_for_standstill(now, self._hang_timeout)

    def _reset_silence(self, now: float) -> None:
        for member in self.members.values():
            member.reported_at = now
        self._progressed_at = now

    def _check_for_frozen(self, now: float, timeout: float) -> None:
        """End the run if ranks are silent, or stuck in the kernel.

        If all are silent, the whole job was stopped, as by Ctrl-Z. Its processes may continue at different moments, so
        the silence until then does not count.
        """
        silent = [channel for channel, member in self.members.items() if now - member.reported_at > timeout]
        stuck = [channel for channel, member in self.members.items() if member.stuck[1] > timeout]
        all_were_silent, self._all_silent = self._all_silent, len(silent) == len(self.members)
        if self._all_silent or not (silent or stuck):
            return
        if all_were_silent:
            self._reset_silence(now)
            return
        reports = []
        for channel in dict.fromkeys([*silent, *stuck]):
            member = self.members[channel]
            how = "it sent nothing" if channel in silent else f"{member.stuck[0]} has been stopped or stuck"
            reports.append(f"{member.place} is frozen: {how} for {timeout:g} s, and before it was {member.doing}")
        silent_ranks = [self.members[channel].rank for channel in silent]
        self._fail_of_itself("; ".join(reports[:10]), frozen=True, silent=silent_ranks[:1000])
        for channel in silent:
            channel.send_urgently()

    def _check_for_broken_barrier(self) -> None:
        """End the run if a rank waits at a barrier at which another one cannot arrive any more."""
        waiting = [m for m in self.members.values() if m.arrival is not None and m.barriers > self.released]
        others = (m for m in self.members.values() if m.barriers <= self.released)
        ahead = max(others, key=lambda other: other.batches, default=None)
        for member in waiting:
            assert member.arrival is not None
            arrival = member.arrival
            passed = next((f"{place} has ended its run" for place in self._left), None)
            if ahead is not None and ahead.batches > arrival["batches"]:
                passed = f"{ahead.place} trains on with batch {ahead.batches} of the run"
            if passed is not None:
                purpose: Purpose = arrival["purpose"]
                what, remedy = _PURPOSES[purpose]
                when = f"after {arrival['batches']} batches of the run{in_line(arrival['line'])}"
                self._fail_of_itself(f"{member.place} {what}{arrival['what']} {when}, and {passed}. {remedy}")
                return

    def _check_for_deadlock(self, timeout: float) -> None:
        """End the run if all ranks have waited for each other for ``timeout`` seconds in different places.

        A collective in which all ranks wait in the same place is slow, not stuck.
        """
        members = sorted(self.members.values(), key=lambda member: member.rank)
        waits = [member.wait for member in members if member.wait is not None and member.wait["seconds"] >= timeout]
        if not members or len(waits) < len(members) or self.missing:
            return
        pairs = zip(members, waits, strict=True)
        places = {(m.batches, wait["place"], wait["collectives"]) for m, wait in pairs}
        if len(places) == 1 and not self._left:
            return
        rows = [("rank", "waits in", "during", "line of the program")]
        for member, wait in zip(members, waits, strict=True):
            rows.append((member.place, wait["call"][:80], member.doing[:80], wait["line"][:80] or "-"))
        rows += [(place, "has ended its run", "-", "-") for place in self._left]
        self._fail_of_itself(
            f"no rank made progress for {timeout:g} s (hang_timeout): the ranks wait for each other in different"
            f" places\n{_table(rows[:33])}\n{self._likely_cause(members, waits)}",
            stuck=True,
        )

    def _likely_cause(self, members: Sequence[RankStatus], waits: Sequence[Message]) -> str:
        saving = [
            member.rank
            for member, wait in zip(members, waits, strict=True)
            if wait["call"] == "trainer.save_checkpoint"
        ]
        if saving and len(saving) < len(members):
            return (
                f"Likely cause: {names_of_ranks(saving)} called trainer.save_checkpoint and the others did not."
                f" {_SAVE_ON_ALL_RANKS}"
            )
        ends = [wait["call"].startswith("teardown") for wait in waits]
        ends += [member.arrival is not None and member.arrival["purpose"] == "end" for member in members]
        if self._left or any(ends):
            return f"Likely cause: training ended on some ranks only. {_STOP_ON_ALL_RANKS}"
        counts = [wait["collectives"] for wait in waits]
        more = [member.rank for member, count in zip(members, counts, strict=True) if count > min(counts)]
        if more:
            return (
                f"Likely cause: {names_of_ranks(more)} called more collectives (barrier, all_gather, all_reduce,"
                " self.log(..., sync_dist=True)) than other ranks. Call them on all ranks alike"
            )
        done = [m.rank for m in members if _has_ended_batch(m) and m.barriers > self.released]
        others = [wait for member, wait in zip(members, waits, strict=True) if member.rank not in done]
        if others and all(map(_is_in_step, others)) and (done or len({member.batches for member in members}) > 1):
            behind = [member.rank for member in members if member.rank not in done]
            ended = f"{names_of_ranks(done)} ended a batch, and {names_of_ranks(behind)} did not. " if done else ""
            return f"Likely cause: {ended}The ranks took unequal numbers of optimizer steps. {_EQUAL_STEPS}"
        return (
            "Likely cause: a collective (barrier, all_gather, all_reduce, self.log(..., sync_dist=True)) was called on"
            " some ranks only, or more often. Call it on all ranks alike"
        )

    def _check_for_standstill(self, now: float, timeout: float) -> None:
        """Report once if all ranks are alive and none makes progress."""
        progress = {member.rank: member.progress for member in self.members.values()}
        if progress != self._progress:
            self._progress, self._progressed_at, self._standstill_reported = progress, now, False
            return
        last_beats = 2 * seconds_between_beats(self._size, timeout)  # these may show a deadlock
        is_short = now - self._progressed_at <= timeout + last_beats
        has_begun = all(progress.values()) or any(m.wait and m.wait["seconds"] > timeout for m in self.members.values())
        if self._failure is not None or self._standstill_reported or is_short or not has_begun:
            return
        members = sorted(self.members.values(), key=lambda member: member.rank)
        if all(
            max(member.stuck[1], now - member.reported_at) <= timeout / 2 for member in members
        ):  # no rank is frozen
            self._standstill_reported = True
            where = "; ".join(map(_activity, members[:20]))
            text = f"no rank made progress for {timeout:g} s (hang_timeout), and the run goes on: {where}"
            print(f"lightning_hiercomm: {text}", file=sys.stderr, flush=True)
            self._send_to_all({"kind": "dump"})

    # ---- messages ------------------------------------------------------------------------------------------------

    def _send_to_all(self, message: Message) -> None:
        for channel in self.members:
            self._send(channel, message)

    def _send(self, channel: Channel, message: Message) -> None:
        with contextlib.suppress(OSError):  # reading from a closed connection drops it
            channel.send(message)


def probe_peer(connection: socket.socket, seconds: int = UNREACHABLE_SECONDS) -> None:
    """Make the kernel close a connection whose peer is unreachable for ``seconds``, as after a power failure."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds // 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds // 6)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)  # for unacknowledged data


def _difference(arrivals: Sequence[tuple[RankStatus, Message]]) -> str | None:
    """Return a message if ranks at a barrier have different reasons or numbers of steps; otherwise None."""
    arrivals = sorted(arrivals, key=lambda each: each[0].rank)
    reasons: dict[tuple[Purpose, str], list[int]] = {}
    for member, arrival in arrivals:
        reasons.setdefault((arrival["purpose"], arrival["what"]), []).append(member.rank)
    if len(reasons) > 1:
        order = [*_PURPOSES]
        first, second = sorted(reasons, key=lambda reason: order.index(reason[0]))[:2]
        described = [f"{names_of_ranks(reasons[each])} {_PURPOSES[each[0]][0]}{each[1]}" for each in (first, second)]
        lines = {member.rank: arrival["line"] for member, arrival in arrivals}
        cause, line = (lines[reasons[each][0]] for each in (first, second))
        if cause != line:
            described[0] += in_line(cause)
        return f"{', and '.join(described)}{in_line(line)}. {_PURPOSES[first[0]][1]}"
    one, steps = arrivals[0][0], arrivals[0][1]["steps"]
    for other, arrival in arrivals:
        if arrival["steps"] != steps:
            return (
                f"{one.place} has taken {_optimizer_steps(steps)} and {other.place}"
                f" {_optimizer_steps(arrival['steps'])}. {_EQUAL_STEPS}"
            )
    return None


def _has_ended_batch(member: RankStatus) -> bool:
    return member.arrival is not None and member.arrival["purpose"] in ("epoch", "average")


def _is_in_step(wait: Message) -> bool:
    """Return whether a rank waits in a backward pass or in this package, not in a collective of the user."""
    call: str = wait["call"]
    return call == "backward" or call.endswith("(lightning_hiercomm)")


def _optimizer_steps(counts: Sequence[int]) -> str:
    if len(counts) == 1:
        return f"{counts[0]} optimizer step{'s' if counts[0] != 1 else ''}"
    return f"{', '.join(map(str, counts))} steps of its optimizers"


def _activity(member: RankStatus) -> str:
    if member.wait is not None:
        return f"{member.place}, {member.doing}, waits in {member.wait['call']}{in_line(member.wait['line'])}"
    return f"{member.place}, {member.doing}, is busy{in_line(member.line)}"


def in_line(line: str) -> str:
    """Return where a line of the user's code is, for a message; empty if there is none."""
    return f" in {line}" if line else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def names_of_ranks(ranks: Iterable[int]) -> str:
    """Return a text such as "rank 3" or "ranks 0-3, 8"."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for rank in numbers:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(shown[:10])}{', ...' if len(shown) > 10 else ''}"


def main() -> None:
    """Serve on the inherited listening socket."""
    meant_for_ranks = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for number in meant_for_ranks:  # ranks end, or save, by themselves
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one handle per rank
    settings = json.loads(sys.stdin.readline())
    listener = socket.socket(fileno=settings.pop("listener"))
    Hub(listener, **settings).serve(parent=sys.stdin.fileno())


if __name__ == "__main__":
    main()

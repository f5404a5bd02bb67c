"""The record of a run whose nodes come and go: what one needs, beside the program, to train it once more to the bit."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_hiercomm.elastic.meeting import Meeting

log = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """Agreements, one after the other, in which everything was the same. What was taken back is not among them.

    Attributes:
        members: Who took part, by life, in the order of their names; each of its ranks has the same weight.
        newcomers: By life, the life of the member that gave it its state after the agreement.
        connects: Whether nodes connected to each other anew: then what encoding has kept back begins at zero.
        looks: Whether it was for a validation or a checkpoint only: nodes went on from where each was.
        shares: By life, which shares of the data its ranks take from then on.
        all_shares: Into how many the data are cut.
        steps: Optimizer steps before the first of these agreements.
        until: And before the last.
        times: How many there were.
    """

    members: tuple[str, ...]
    newcomers: Mapping[str, str]
    connects: bool
    looks: bool
    shares: Mapping[str, tuple[int, ...]]
    all_shares: int
    steps: int
    until: int
    times: int = 1

    def followed_by(self, other: Entry) -> Entry | None:
        """Both as one entry; None if they differ in more than when they were, or that has to be known of each."""
        is_same = replace(other, steps=self.steps, until=self.until, times=self.times) == self
        if not is_same or self.newcomers or other.connects or self.looks:
            return None
        return replace(self, until=other.until, times=self.times + other.times)


@dataclass(frozen=True)
class Epoch:
    """An epoch of the data.

    Attributes:
        number: From 0.
        shares: By life, which shares of the data its ranks take, unless an agreement says otherwise later.
        all_shares: Into how many the data are cut.
    """

    number: int
    shares: Mapping[str, tuple[int, ...]]
    all_shares: int


@dataclass
class Record:
    """Who took part in what, since the run began; the same on all nodes, for a newcomer goes on with its source's.

    Attributes:
        lives: The name of the node and its number of ranks, by life.
        entries: Agreements, in their order.
        epochs: By the number of batches that each rank had trained on before.
        about: What else is needed, or worth to know: the scheme, the wire, seeds.
        steps: Optimizer steps of the whole run; 0 until it is over.
        ends_epoch: Whether the last one was also the last of an epoch.
        parameters: :func:`digest` of the model in the end.
    """

    lives: dict[str, tuple[str, int]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    epochs: dict[int, Epoch] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    ends_epoch: bool = False
    parameters: str = ""

    def note(
        self,
        meeting: Meeting,
        looks: bool,
        steps: int,
        shares: Mapping[str, tuple[int, ...]],
        all_shares: int,
    ) -> bool:
        """An agreement holds; whether nodes went or came.

        Args:
            meeting: Of it.
            looks: Whether it was for a look at the agreed model only.
            steps: Optimizer steps so far.
            shares: Of everyone who was there.
            all_shares: Of the data.
        """
        for each in (*meeting.members, *meeting.newcomers):
            self.lives[each.life] = each.node, each.ranks
        sources = {each.life: meeting.source_of(each.life) for each in meeting.newcomers}
        entry = Entry(
            tuple(each.life for each in meeting.members),
            {life: source.life for life, source in sources.items() if source is not None},
            not meeting.is_connected,
            looks,
            dict(shares),
            all_shares,
            steps,
            steps,
        )
        last = self.entries[-1] if self.entries else None
        together = None if last is None else last.followed_by(entry)
        if together is not None:
            self.entries[-1] = together
        else:
            self.entries.append(entry)
        return last is None or last.members != entry.members or bool(entry.newcomers)

    def agreements(self) -> Iterator[Entry]:
        """Each agreement by itself; of several in one entry it is only known between which steps they were."""
        for entry in self.entries:
            for number in range(entry.times):
                yield replace(entry, times=1, connects=entry.connects and number == 0)

    def lines(self) -> list[str]:
        """For people: the run in a few lines, and who came and went when."""
        newcomers = {life for entry in self.entries for life in entry.newcomers}  # some ask more than once
        agreements = sum(entry.times for entry in self.entries)
        names = {node for node, _ in self.lives.values()}
        said = [
            f"{self.about.get('scheme')}: {self.steps} steps, {agreements} agreements, {len(names)} nodes in"
            f" {len(self.lives)} lives, {len(newcomers)} newcomers"
        ]
        known: dict[str, str] = {}
        for entry in self.entries:
            now = {life: self.lives[life][0] for life in (*entry.members, *entry.newcomers)}
            gone = [f"node {node} is gone" for life, node in known.items() if life not in now]
            come = [
                f"node {self.lives[life][0]} has come, and goes on from node {self.lives[by][0]}"
                for life, by in entry.newcomers.items()
            ]
            if known and (gone or come):
                said.append(f"  step {entry.steps}: {', '.join(gone + come)}")
            known = now
        return said

    def to_plain(self) -> dict[str, Any]:
        """Primitives only, which JSON and ``weights_only`` loading know; names of nodes, and lives by short numbers."""
        numbers = {life: number for number, life in enumerate(self.lives)}
        total = {life: ranks for life, (_, ranks) in self.lives.items()}

        def of_data(part: Entry | Epoch) -> dict[str, Any]:
            shares = {str(numbers[life]): list(shares) for life, shares in part.shares.items()}
            return {"shares": shares, "all_shares": part.all_shares}

        def plain(entry: Entry) -> dict[str, Any]:
            ranks = sum(total[life] for life in entry.members)
            return {
                "times": entry.times,
                "steps": [entry.steps, entry.until],
                "members": [
                    {"life": numbers[life], "node": self.lives[life][0], "weight": total[life] / ranks}
                    for life in entry.members
                ],
                "healed": [{"life": numbers[who], "by": numbers[by]} for who, by in entry.newcomers.items()],
                "connects": entry.connects,
                "looks": entry.looks,
                **of_data(entry),
            }

        return {
            "format": FORMAT,
            "about": self.about,
            "steps": self.steps,
            "ends_epoch": self.ends_epoch,
            "parameters": self.parameters,
            "lives": [{"node": node, "ranks": ranks, "life": life} for life, (node, ranks) in self.lives.items()],
            "epochs": [
                {"epoch": epoch.number, "begins_after_batches": batches, **of_data(epoch)}
                for batches, epoch in self.epochs.items()
            ],
            "agreements": [plain(entry) for entry in self.entries],
        }

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Record:
        """Undo :meth:`to_plain`.

        Raises:
            ValueError: If it is no record that this version knows.
        """
        if value.get("format") != FORMAT:
            raise ValueError(f"it is no record of format {FORMAT}: format={value.get('format')!r}")
        lives = [each["life"] for each in value["lives"]]

        def shares(each: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
            return {lives[int(life)]: tuple(shares) for life, shares in each["shares"].items()}

        entries = [
            Entry(
                tuple(lives[member["life"]] for member in each["members"]),
                {lives[healed["life"]]: lives[healed["by"]] for healed in each["healed"]},
                each["connects"],
                each["looks"],
                shares(each),
                each["all_shares"],
                each["steps"][0],
                each["steps"][1],
                each["times"],
            )
            for each in value["agreements"]
        ]
        return cls(
            {each["life"]: (each["node"], each["ranks"]) for each in value["lives"]},
            entries,
            {
                each["begins_after_batches"]: Epoch(each["epoch"], shares(each), each["all_shares"])
                for each in value["epochs"]
            },
            dict(value["about"]),
            value["steps"],
            value["ends_epoch"],
            value["parameters"],
        )

    def write(self, path: Path) -> None:
        """As a JSON file, which is there whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(self.to_plain(), indent=1) + "\n")
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> Record:
        """A record that was written.

        Raises:
            ValueError: If there is none, saying why.
        """
        try:
            return cls.from_plain(json.loads(path.read_text()))
        except (OSError, KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise ValueError(f"cannot read {path} as the record of an elastic run: {error}") from error


class Recorder:
    """Keeps the record of this node's run, and writes it on the node that writes what all have in common.

    Args:
        about: What else is worth to know of the run.
        place: The file, if this node is to write at this moment.
    """

    def __init__(self, about: Mapping[str, Any], place: Callable[[], Path | None] = lambda: None) -> None:
        self.record = Record(about=dict(about))
        self._place = place
        self._may_write = True

    def note(
        self, meeting: Meeting, looks: bool, steps: int, shares: Mapping[str, tuple[int, ...]], all_shares: int
    ) -> None:
        """An agreement holds; see :meth:`Record.note`."""
        if self.record.note(meeting, looks, steps, shares, all_shares):
            self.write()

    def note_epoch(self, number: int, batches: int, shares: Mapping[str, tuple[int, ...]], all_shares: int) -> None:
        """An epoch begins, after so many batches of each rank; see :class:`Epoch`."""
        self.record.epochs[batches] = Epoch(number, dict(shares), all_shares)

    def end(self, steps: int, ends_epoch: bool, module: nn.Module) -> None:
        """The run is over, and nodes are equal."""
        self.record.steps, self.record.ends_epoch = steps, ends_epoch
        if self._place() is not None:  # it takes seconds for a large model
            self.record.parameters = digest(module)
        self.write()

    def give(self) -> str:
        """For a node that this one heals."""
        return json.dumps(self.record.to_plain())

    def take(self, given: str) -> None:
        """Go on with another node's record, as that gives it."""
        self.record = Record.from_plain(json.loads(given))

    def write(self) -> None:
        """See to the file; a folder that cannot be written to ends no run."""
        path = self._place() if self._may_write else None
        if path is None:
            return
        try:
            self.record.write(path)
        except OSError as error:
            log.warning("cannot write the record of this run: %s", error)
            self._may_write = False


def digest(module: nn.Module, names: Collection[str] | None = None) -> str:
    """Tells whether two modules hold the same parameters and float buffers, to the bit.

    Args:
        module: Any.
        names: Of those that count. Default: all.
    """
    seen = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and (names is None or name in names):
            seen.update(name.encode())
            seen.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()

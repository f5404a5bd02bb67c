"""The record of an elastic run: small, the same when it is read again, and in no run's way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_hiercomm.elastic.meeting import Meeting, Member
from lightning_hiercomm.elastic.record import Record, Recorder, digest

FIRST = {"0.a": (0,), "1.a": (1, 2)}


def member(life: str, ranks: int = 1, connected: bool = True) -> Member:
    return Member(life.partition(".")[0], life, "run", ranks, "store", agreement=1, groups="x" if connected else "")


def connected(*members: Member) -> Meeting:
    """Members that are connected to each other already."""
    fresh = Meeting(members)
    known = fresh.groups
    return Meeting(tuple(Member(**{**vars(each), "groups": known}) for each in members))


def noted() -> Record:
    record = Record(about={"scheme": "DiLoCo(4)"})
    zero, one = member("0.a", 1, False), member("1.a", 2, False)
    assert record.note(Meeting((zero, one), begins=True), False, 0, FIRST, 3)
    for step in (4, 8, 12):
        assert not record.note(connected(zero, one), False, step, FIRST, 3)
    assert not record.note(connected(zero, one), True, 12, FIRST, 3), "nobody went or came: nothing is to be written"
    assert record.note(Meeting((zero,), (member("1.b", 2),)), False, 16, {**FIRST, "1.b": (1, 2)}, 3)
    return record


def test_agreements_of_the_same_nodes_are_one_entry_and_looks_and_changes_are_their_own():
    record = noted()
    assert [(e.steps, e.until, e.times, e.connects, e.looks) for e in record.entries] == [
        (0, 0, 1, True, False),
        (4, 12, 3, False, False),
        (12, 12, 1, False, True),
        (16, 16, 1, True, False),
    ]
    assert record.entries[-1].newcomers == {"1.b": "0.a"}
    assert sum(1 for _ in record.agreements()) == 6
    assert [entry.connects for entry in record.agreements()] == [True, False, False, False, False, True]


def test_a_thousand_agreements_take_no_more_room_than_one():
    record, two = noted(), connected(member("0.a"), member("1.b", 2))
    sizes = []
    for step in range(20, 4020, 4):
        record.note(two, False, step, {}, 3)
        sizes.append(len(json.dumps(record.to_plain())))
    assert sizes[-1] - sizes[0] < 10


def test_a_record_says_weights_and_who_was_healed_by_whom_and_is_the_same_when_it_is_read(tmp_path):
    record = noted()
    recorder = Recorder({}, lambda: tmp_path / "folder" / "elastic.json")
    recorder.take(json.dumps(record.to_plain()))
    recorder.note_epoch(1, 12, FIRST, 3)
    recorder.end(16, True, torch.nn.Linear(2, 2))
    path = tmp_path / "folder" / "elastic.json"
    plain = json.loads(path.read_text())
    assert [each["weight"] for each in plain["agreements"][0]["members"]] == [1 / 3, 2 / 3]
    assert plain["agreements"][-1]["healed"] == [{"life": 2, "by": 0}]
    assert plain["lives"][2] == {"node": "1", "ranks": 2, "life": "1.b"}
    again = Record.read(path)
    assert again == recorder.record
    assert again.lines() == [
        "DiLoCo(4): 16 steps, 6 agreements, 2 nodes in 3 lives, 1 newcomers",
        "  step 16: node 1 is gone, node 1 has come, and goes on from node 0",
    ]
    assert [each.name for each in path.parent.iterdir()] == ["elastic.json"]


def test_a_folder_that_cannot_be_written_to_ends_no_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    recorder = Recorder({}, lambda: tmp_path / "file" / "elastic.json")
    for _ in range(2):
        recorder.write()
    assert caplog.text.count("cannot write the record of this run") == 1


@pytest.mark.parametrize("text", ["", "7", "{}", '{"format": 2}', '{"format": 1, "lives": []}'])
def test_what_is_no_record_is_said_to_be_none(tmp_path, text):
    path = tmp_path / "elastic.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"cannot read .* as the record of an elastic run"):
        Record.read(path)
    with pytest.raises(ValueError, match="cannot read nowhere"):
        Record.read(Path("nowhere"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_tells_the_last_bit(dtype):
    one = torch.nn.BatchNorm1d(3).to(dtype)
    other = torch.nn.BatchNorm1d(3).to(dtype)
    assert digest(one) == digest(other)
    with torch.no_grad():
        other.running_mean[1] = torch.finfo(dtype).tiny
    assert digest(one) != digest(other)

"""What a run costs before its first step: counted, so that no clock has a say."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import asdict, replace

import pytest

pytest.importorskip("benchmarks")

from benchmarks import crowd, startup
from benchmarks.__main__ import make_parser
from benchmarks.crowd import Crowd
from benchmarks.startup import DDP, Start
from lightning_hiercomm.comm import torch as over_torch
from lightning_hiercomm.control import open_files


@pytest.mark.long("starts up to ten ranks twice")
def test_store_keys_and_connections_do_not_grow_with_the_world(monkeypatch):
    monkeypatch.setattr(over_torch, "_MOST_DIRECT_PEERS", 1)  # lanes are large from two ranks on
    few, many = startup.measure(6, 2), startup.measure(10, 2)
    for start in (few, many):
        assert start.words["meeting"] == 7 * start.ranks
        words = {phase: start.words[phase] / start.ranks for phase in ("topology", "twin", "agreements")}
        assert words == {"topology": 8, "twin": 8, "agreements": 0}
        assert start.words[DDP] / start.ranks == 2 * start.ranks + 1  # torch's own group needs the square
        assert start.words["group"] == start.words[DDP]
    assert many.handles_beyond == few.handles_beyond  # a lane's ring has two neighbours
    assert many.handles[DDP] - few.handles[DDP] == 4


@pytest.mark.long("starts up to twelve ranks twice")
def test_store_keys_and_connections_do_not_grow_beyond_a_full_mesh(monkeypatch):
    monkeypatch.setattr(over_torch, "_MOST_DIRECT_PEERS", 1)
    monkeypatch.setattr(open_files, "_MOST_IN_MESH", 5)
    few, many = startup.measure(6, 2), startup.measure(12, 2)
    assert [start.words["group"] / start.ranks for start in (few, many)] == [1, 1]
    assert max(start.words["topology"] / start.ranks for start in (few, many)) <= 8 + 4  # a tree's edges
    assert few.words[DDP] / few.ranks == 2 * few.ranks + 1  # whose ranks are in a mesh all the same
    assert many.handles["agreements"] - few.handles["agreements"] <= 2  # one more power of two to talk to


def test_small_process_groups_start_fully_connected():
    start = startup.measure(6, 1)
    assert start.words["agreements"] == 0
    assert start.handles["agreements"] == start.handles["twin"]


def test_a_rank_that_fails_is_named_and_none_is_left(monkeypatch):
    def fail(rank, *_):
        if rank == 1:
            raise ValueError("no luck")

    monkeypatch.setattr(startup, "_start", fail)
    before = multiprocessing.active_children()  # ranks that stay for other tests
    with pytest.raises(RuntimeError, match="rank 1: ValueError: no luck"):
        startup.measure(3, 1)
    monkeypatch.setattr(startup, "_start", lambda *_: startup.time.sleep(60))
    with pytest.raises(RuntimeError, match="2 of 2 ranks are not done in time"):
        startup.measure(2, 1, timeout=1.0)
    assert set(multiprocessing.active_children()) <= set(before)


def test_a_hub_serves_hundreds_of_ranks_that_one_process_plays():
    played = crowd.measure(200, seconds=0.2)
    assert played.ranks == 200
    assert min(played.joined_seconds, played.failure_seconds, played.megabytes, played.watched_seconds) > 0


def start(ranks: int, **other) -> Start:
    seconds = {"meeting": 1.0, "group": 10.0, "topology": 1.5, "twin": 0.5, "agreements": 0.1, "ddp": 10.0}
    words = dict.fromkeys((*startup.PHASES, DDP), 10 * ranks)
    handles = {"meeting": 5, "group": 4 + ranks, "topology": 14 + ranks, "twin": 24 + ranks, "agreements": 26 + ranks}
    handles[DDP] = ranks
    return Start(ranks, 4, False, seconds, seconds, words, handles, handles, 7, **other)


def test_the_page_says_what_a_start_takes_beyond_ddps():
    page = startup.page([start(64), replace(start(128), lazy_default_group=True)])
    assert "| 64 | 4 | 1.00 | 10.00 | 1.50 | 0.50 | 10.00 | 0.30 | 13.0 | 10.0 | 0.30 |" in page
    assert "| 64 | 3200 | 50.0 | 640 | 10.0 | 90 | 64 | 26 | 90 | 64 |" in page
    assert "| 128 (lazy) | 4 |" in page
    assert "with more than 64 ranks" in page.lower()
    assert "TORCH_GLOO_LAZY_INIT=1" in page


def test_the_command_keeps_what_is_stored_and_draws_it(tmp_path, capsys, monkeypatch):
    (tmp_path / "startup.json").write_text(json.dumps({"starts": [asdict(start(16))], "hubs": []}))
    monkeypatch.setattr(startup, "measure_crowd", lambda ranks: Crowd(ranks, 1.5, 0.25, 0.016, 24.0, 20.0))
    monkeypatch.setattr(startup, "measure", lambda ranks, *_: start(ranks))
    arguments = make_parser().parse_args(["startup", "--ranks", "8", "16", "--hub", "99", "--out", str(tmp_path)])
    arguments.command(arguments)
    starts, (hub,) = startup.load(tmp_path / "startup.json")
    assert [each.ranks for each in starts] == [8, 16]
    assert hub.ranks == 99
    assert "hub with 99 ranks, which one process plays: all had joined" in (tmp_path / "startup.md").read_text()
    assert (tmp_path / "startup.md").read_text().count("| 16 | 4 |") == 1
    assert (tmp_path / "startup.png").stat().st_size > 5_000

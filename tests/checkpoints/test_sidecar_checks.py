"""A sidecar that is damaged, of another run or of another format is refused."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from harness import on_ranks
from sidecar_cases import Net
from torch.utils._pytree import tree_flatten

from lightning_hiercomm import AllReduce, DiLoCo
from lightning_hiercomm.checkpoints import FORMAT
from lightning_hiercomm.checkpoints.durable import DurableCheckpointIO
from lightning_hiercomm.checkpoints.plain import Checkpoints
from lightning_hiercomm.checkpoints.sidecar import (
    random_state,
    restore_sidecar,
    set_random_state,
    sidecar_state,
)
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.training_run import TrainingRun

pytestmark = pytest.mark.pooled


@pytest.fixture
def load(tmp_path):
    """``load(rank, identity=..., nodes=..., module=...)`` for the sidecars of two ranks next to "saved.ckpt"."""

    @functools.cache
    def attached(rank, nodes, module):
        def work(topology):
            return TrainingRun(AllReduce(), Replicas(module, [torch.optim.Adam(module.parameters())]), topology)

        return on_ranks(work, nodes)[rank]

    usual = torch.nn.Linear(2, 2)

    def run(rank, identity="good", nodes=((0,), (1,)), module=None):
        own = attached(rank, nodes, module or usual)
        checkpoint = {"hiercomm": {"format": FORMAT, "identity": identity}}
        checkpoints = Checkpoints(with_replicas=True)
        checkpoints.take(checkpoint, tmp_path / "saved.ckpt", DurableCheckpointIO(), own.topology)
        sidecar = checkpoints._sidecar  # noqa: SLF001
        checkpoints.restore(own)
        return {**sidecar, "of rank": checkpoint["of rank"]}

    replicas = tmp_path / "saved.ckpt.replicas" / "good"
    for rank in range(2):
        state = sidecar_state(attached(rank, ((0,), (1,)), usual), False, entries={"of rank": rank})
        DurableCheckpointIO().save_checkpoint(state, replicas / f"rank-000{rank}")
    return run


def test_a_sidecar_holds_the_state_of_its_rank(load):
    assert [load(rank)["of rank"] for rank in range(2)] == [0, 1]


def is_refused(load, file: Path, message: str, error=ValueError, **arguments) -> None:
    with pytest.raises(error, match=message) as raised:
        load(1, **arguments)
    assert str(file) in str(raised.value)
    assert "Set checkpoint_replicas=False to resume from the averaged parameters instead." in str(raised.value)


def test_a_sidecar_of_another_place_is_refused(load, tmp_path):
    file = tmp_path / "saved.ckpt.replicas" / "good" / "rank-0001"
    is_refused(load, tmp_path / "saved.ckpt", "saved without checkpoint_replicas=True", identity=None)
    is_refused(load, file, r"saved by nodes \[\[0\], \[1\]\], but this run has \[\[0, 1\]\]", nodes=((0, 1),))
    is_refused(load, file, "another model: bias, weight are not the same", module=torch.nn.Linear(3, 3))
    file.unlink()
    is_refused(load, file, "is missing", FileNotFoundError)


def test_a_sidecar_that_is_cut_off_or_not_one_is_refused(load, tmp_path):
    file = tmp_path / "saved.ckpt.replicas" / "good" / "rank-0001"
    whole = file.read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        is_refused(load, file, "cannot be read: ")
    for something in ([1, 2], {}, {"identity": "good"}):
        torch.save(something, file)
        is_refused(load, file, "has no format number")


@pytest.mark.parametrize(("number", "found"), [(None, "no format number"), (6, "format 6")])
def test_a_sidecar_of_another_format_is_refused(load, tmp_path, number, found):
    file = tmp_path / "saved.ckpt.replicas" / "good" / "rank-0001"
    state = torch.load(file, weights_only=True)
    state["format"] = number
    torch.save(state, file)
    with pytest.raises(ValueError, match=r"^.* has .*\.$") as raised:
        load(1)
    assert str(raised.value) == (
        f"{file} has {found}, but this version of lightning-hiercomm reads only format 5. Set checkpoint_replicas=False"
        " to resume from the averaged parameters instead."
    )


def same(one: dict, other: dict) -> bool:
    (leaves, places), (others, other_places) = map(tree_flatten, (one, other))
    equal = (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(leaves, others, strict=True))
    return places == other_places and all(equal)


def test_a_flipped_byte_anywhere_is_refused_or_changes_nothing(load, tmp_path):
    file = tmp_path / "saved.ckpt.replicas" / "good" / "rank-0001"
    whole, expected = file.read_bytes(), load(1)
    refused = 0
    for place in range(0, len(whole), 211):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            is_same = same(load(1), expected)  # it was between the records
        except ValueError as error:
            is_same = str(file) in str(error)
            refused += 1
        assert is_same
    assert refused > len(whole) / 211 / 3


def test_the_random_stream_of_a_gpu_is_restored_under_any_index(monkeypatch):
    own, put_back = torch.arange(16, dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: own)
    monkeypatch.setattr(torch.cuda, "set_rng_state", put_back.append)
    state = random_state()
    set_random_state(state)
    assert put_back == [own]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    set_random_state(state)  # a resume without a GPU
    assert put_back == [own]


@pytest.mark.parametrize(
    ("fragments", "bucket_bytes", "message"),
    [
        ("layers.3", 2**22, r"layers\.0.* but this run has .*layers\.3"),
        ("layers.0", 2**20, "bucket_mb=4.*bucket_mb=1,"),
    ],
)
def test_other_settings_are_refused(fragments, bucket_bytes, message):
    def work(topology):
        module = Net()
        optimizers = [module.configure_optimizers()["optimizer"]]
        saved, now = (
            TrainingRun(DiLoCo(4, fragments=[part]), Replicas(module, optimizers, size), topology)
            for part, size in (("layers.0", 2**22), (fragments, bucket_bytes))
        )
        state = sidecar_state(saved, False, {}) | {"path": "it"}
        restore_sidecar(state, saved)
        with pytest.raises(ValueError, match=f"it was saved with .*{message}"):
            restore_sidecar(state, now)
        for run in (saved, now):
            run.close(timeout=5.0)

    on_ranks(work, [[0, 1], [2, 3]])

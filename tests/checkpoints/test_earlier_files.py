"""Files that an earlier version of the package has written are resumed by this one, to the bit.

They lie in ``earlier/``, with what that version went on to from them. ``WRITE_EARLIER_FILES=1 pytest -k test_write``
has written them, and is for new names only: the old ones are to be read by every later version. Most numbers of the
runs have so few digits that they are exact.
"""

from __future__ import annotations

import copy
import os
import random
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from harness import Rank, on_nodes
from problems import one_trainer
from torch.utils.data import DataLoader

from lightning_hiercomm import (
    DASO,
    Agreement,
    AllReduce,
    DiLoCo,
    Gossip,
    HierarchicalStrategy,
    PeriodicAveraging,
    RandomPermutation,
    StepsDelay,
)
from lightning_hiercomm.schemes import OuterOptimizer, Staggered

EARLIER = Path(__file__).parent / "earlier"
AFTER, STEPS = 7, 12  # of the run when the files were written, and of the whole run
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=True)
Adam = partial(torch.optim.Adam, lr=0.125)
Halved = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
Phases = partial(DASO, warmup_steps=2, cooldown_steps=2)
Delay = partial(StepsDelay, 2, local_lr_scale=0.5)

FILES: dict[str, tuple[Any, dict[str, Any]]] = {
    "all_reduce": (AllReduce, {}),
    "periodic": (partial(PeriodicAveraging, 4), {}),
    "daso": (partial(Phases, 4, 2), {}),
    "steps_delay": (partial(Delay, warmup_steps=2), {}),
    "gossip": (partial(Gossip, segments=2, overlap=True), {}),
    "diloco": (partial(DiLoCo, 4, SGD, outer_scheduler=Halved), {}),
    "streaming": (partial(DiLoCo, 4, Adam, fragments=2, staleness=1, keep_local=0.5), {"wire_dtype": "int8"}),
}
"""By name a scheme, and other arguments of the strategy, of runs of a Trainer with two nodes of one rank."""

STATES: dict[str, tuple[Any, dict[str, Any]]] = {
    "all_reduce": (AllReduce, {"wire": "bfloat16"}),
    "periodic": (partial(PeriodicAveraging, 4), {"wire": "int8"}),
    "before_step": (partial(PeriodicAveraging, 3, order="before_step"), {}),
    "local": (partial(PeriodicAveraging, 4, gradients="none", node_sync_every=2), {"wire": "bfloat16"}),
    "daso": (partial(Phases, 4, 2), {"wire": "bfloat16"}),
    "daso_local": (partial(Phases, 4, 2, merge="delta", exchange="sharded", gradients="none"), {}),
    "steps_delay": (partial(Delay, warmup_steps=2), {"wire": "bfloat16"}),
    "steps_delay_warm": (partial(Delay, warmup_steps=8), {}),
    "steps_delay_dc": (partial(Delay, warmup_steps=2, local_update="dc_asgd"), {}),
    "gossip": (partial(Gossip, segments=2, fair=None, overlap=True), {"wire": "bfloat16"}),
    "gossip_flat": (partial(Gossip, "ring", segments=2, hierarchical=False), {}),
    "diloco": (partial(DiLoCo, 4, SGD, outer_scheduler=Halved), {}),
    "streaming": (partial(DiLoCo, 4, Adam, fragments=2, staleness=1, keep_local=0.5), {"wire": "int8"}),
    "late": (partial(DiLoCo, 4, SGD, staleness=2), {"wire": "bfloat16"}),  # when `keep_local` was 0 by default
    "in_flight": (partial(Agreement, when=Staggered(4), what=2, staleness=1, merge="delta"), {"wire": "int4"}),
    "stale": (partial(Agreement, when=3, staleness=2, merge="eq1", through="rotating"), {"wire": "bfloat16"}),
    "noloco": (partial(Agreement, when=3, through=RandomPermutation(), merge=OuterOptimizer(SGD)), {}),
}
"""By name a scheme, and other arguments of the harness, of two nodes of two ranks each that are threads."""


# ---- through a Trainer -----------------------------------------------------------------------------------------------


class Module(pl.LightningModule):
    """Rank r goes from 0 towards r + 1; ``seen`` is what it holds after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
        self.y = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        target = self.global_rank + 1
        return 0.5 * (self.x - target).square().sum() + 0.5 * (self.y + target).square().sum()

    def on_train_batch_end(self, *_):
        self.seen.append(torch.cat([self.x.detach(), self.y.detach().flatten()]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.25, momentum=0.5)

    def train_dataloader(self):
        return DataLoader(torch.zeros(6 * self.trainer.world_size, 1))


class Save(pl.Callback):
    """Saves after a step; the random streams begin anew, so that all companions of the folder have the same."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == AFTER:
            torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
            trainer.save_checkpoint(self.path)


def _fit(folder: Path, name: str, replicas: bool, callbacks=(), ckpt_path=None) -> list[torch.Tensor]:
    make, others = FILES[name]
    strategy = HierarchicalStrategy(make(), ranks_per_node=1, checkpoint_replicas=replicas, **others)
    trainer = one_trainer(folder, strategy=strategy, devices=2, max_epochs=2, callbacks=list(callbacks))
    module = Module()
    trainer.fit(module, ckpt_path=ckpt_path)
    return [*module.seen, torch.cat([module.x.detach(), module.y.detach().flatten()])]


def _resumed(folder: Path) -> dict[tuple[str, str], list[torch.Tensor]]:
    """What a rank goes through that resumes, from its companion and from the agreed model."""
    return {
        (name, how): _fit(folder / name, name, how == "companion", ckpt_path=folder / name / "saved.ckpt")
        for name in FILES
        for how in ("companion", "agreed")
    }


@pytest.fixture(scope="module")
def resumed(borrow, tmp_path_factory):
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(EARLIER / "trainer.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return borrow(_resumed, ranks=2, folder=folder), torch.load(folder / "expected.pt", weights_only=True)


@pytest.mark.parametrize("how", ["companion", "agreed"])
@pytest.mark.parametrize("name", FILES)
def test_a_trainer_goes_on_from_an_earlier_checkpoint(resumed, name, how):
    for got, expected in zip(*resumed, strict=True):
        assert [values.tolist() for values in got[name, how]] == expected[f"{name}/{how}"].tolist()


# ---- schemes by themselves -------------------------------------------------------------------------------------------


def _trained(name: str, begin: Any, steps: int, then: Any = lambda rank: None) -> list[tuple[Any, Any]]:
    make, others = STATES[name]
    shapes = {"a": (3, 2), "b": (5,)}

    def work(rank: Rank) -> tuple[Any, Any]:
        begin(rank)
        for _ in range(steps):
            rank.train()
        kept = then(rank)
        seen = [*rank.trace, rank.agreed().tolist()]
        return kept, torch.tensor(seen, dtype=torch.float64)

    training = {"inner": partial(torch.optim.SGD, lr=0.25, momentum=0.5), "dtype": torch.float64, "steps": STEPS}
    return on_nodes(work, make(), ((0, 1), (2, 3)), shapes=shapes, **training, **others)


@pytest.mark.parametrize("name", STATES)
def test_a_scheme_goes_on_from_an_earlier_state(name):
    with tarfile.open(EARLIER / "states.tar.xz") as archive:
        stored = torch.load(archive.extractfile(f"{name}.pt"), weights_only=True)
    goes_on = _trained(name, lambda rank: rank.load(stored["states"][rank.rank]), STEPS - AFTER)
    for (_, seen), expected in zip(goes_on, stored["expected"], strict=True):
        assert seen.tolist() == expected.tolist()


# ---- written by ------------------------------------------------------------------------------------------------------


def _written(folder: Path) -> None:
    for name in FILES:
        _fit(folder / name, name, True, [Save(folder / name / "saved.ckpt")])


def _pack(archive: Path, folder: Path) -> None:
    EARLIER.mkdir(exist_ok=True)
    with tarfile.open(archive, "w:xz") as packed:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and not file.name.startswith("returned-"):
                packed.add(file, file.relative_to(folder))


def _write(launch: Any, folder: Path) -> None:
    of_trainer, of_schemes = folder / "trainer", folder / "states"
    of_trainer.mkdir(), of_schemes.mkdir()
    launch(_written, ranks=2, folder=of_trainer)
    seen = launch(_resumed, ranks=2, folder=of_trainer)
    expected = [{f"{name}/{how}": torch.stack(values) for (name, how), values in own.items()} for own in seen]
    torch.save(expected, of_trainer / "expected.pt")
    _pack(EARLIER / "trainer.tar.xz", of_trainer)
    for name in STATES:
        states = [kept for kept, _ in _trained(name, lambda rank: None, AFTER, Rank.state)]
        kept = copy.deepcopy(states)  # an optimizer goes on in the tensors that it loads
        goes_on = _trained(name, lambda rank, kept=kept: rank.load(kept[rank.rank]), STEPS - AFTER)
        torch.save({"states": states, "expected": [seen for _, seen in goes_on]}, of_schemes / f"{name}.pt")
    _pack(EARLIER / "states.tar.xz", of_schemes)


@pytest.mark.skipif("WRITE_EARLIER_FILES" not in os.environ, reason="writes what the others read")
def test_write(launch, tmp_path):
    _write(launch, tmp_path)

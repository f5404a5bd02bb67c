"""Loaders and data modules that remember their place: each sample once after a resume in mid-epoch, or a warning."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from problems import warnings_with
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

RANKS, SAMPLES, BATCH, STOP = 4, 64, 2, 3
STEPS = SAMPLES // RANKS // BATCH


class Samples(IterableDataset):
    """The samples of this rank, in order; it remembers those that are left."""

    def __init__(self, rank: int) -> None:
        self.left = list(range(rank, SAMPLES, RANKS))

    def __iter__(self) -> Iterator[float]:
        while self.left:
            yield float(self.left.pop(0))

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = list(state["left"])


class Loader(DataLoader):
    """Remembers the place of its dataset."""

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": self.dataset.state_dict(), "_base_seed": torch.seed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state["dataset"])


class Cursor(pl.LightningDataModule):
    """Remembers the place of each rank."""

    samples: Samples

    def train_dataloader(self) -> DataLoader:
        if not hasattr(self, "samples"):
            self.samples = Samples(self.trainer.global_rank)
        return DataLoader(self.samples, batch_size=BATCH)

    def state_dict(self) -> dict[str, Any]:
        return self.samples.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = Samples(0)
        self.samples.load_state_dict(state)


class Data(pl.LightningDataModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        if self.kind == "own":
            return Loader(Samples(rank), batch_size=BATCH)
        from torchdata.stateful_dataloader import StatefulDataLoader

        make = partial(StatefulDataLoader, batch_size=BATCH, num_workers=2 if "workers" in self.kind else 0)
        samples = [float(sample) for sample in range(SAMPLES)]
        if "stream" in self.kind:
            return make(Samples(rank))
        if "sampler" in self.kind:
            return make(samples, sampler=DistributedSampler(samples, RANKS, rank, seed=3))
        return make(samples, shuffle="shuffle" in self.kind)


class Seen(pl.LightningModule):
    """Notes its samples; saves a checkpoint after some steps, and then stops noting."""

    def __init__(self, path: Path, stop: int) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(1))
        self.path, self.stop = path, stop
        self.seen: list[float] = []
        self.warned: list[str] = []
        self.saved = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if not self.saved:
            self.seen += batch.flatten().tolist()
        return ((self.x - batch.float().mean()) ** 2).sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.stop:
            with warnings_with("") as self.warned:
                self.trainer.save_checkpoint(self.path)
                self.trainer.save_checkpoint(self.path)
            self.saved = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.5)

    @property
    def report(self) -> Any:
        return {"seen": self.seen, "warned": self.warned}


@pytest.fixture
def resumed(fit, tmp_path):
    """Train until a save, resume from it; the samples of both fits, and what rank 0 warned of at the save."""

    def run(kind: str, replicas: bool = False, stop: int = STOP, epochs: int = 1) -> Any:
        if kind.startswith("torchdata"):
            pytest.importorskip("torchdata.stateful_dataloader")
        path = tmp_path / "mid.ckpt"
        batches = STEPS if kind in ("own", "module") or "stream" in kind else 1.0
        fits = []
        for stops, checkpoint in ((stop, None), (0, path)):
            data = Cursor() if kind == "module" else Data(kind)
            arguments = {"datamodule": data, "ckpt_path": checkpoint}
            strategy = {"scheme": "periodic", "checkpoint_replicas": replicas}
            settings = {"fit_arguments": arguments, "limit_train_batches": batches, "max_epochs": epochs}
            fits.append([each["report"] for each in fit(Seen(path, stops), strategy, **settings)])
        seen = [sample for reports in fits for report in reports for sample in report["seen"]]
        places = [text for text in fits[0][0]["warned"] if "place" in text]
        assert not any("place" in text for report in fits[0][1:] for text in report["warned"]), "rank 0 warns"
        return seen, places

    return run


def check_each_once(seen: list[float], epochs: int = 1) -> None:
    assert sorted(seen) == sorted([*range(SAMPLES)] * epochs)


@pytest.mark.parametrize("kind", ["own", "module", "torchdata stream"])
def test_each_sample_comes_once_with_checkpoint_replicas(resumed, kind):
    seen, warned = resumed(kind, replicas=True)
    check_each_once(seen)
    assert warned == []


@pytest.mark.parametrize(("kind", "whose"), [("own", "a train dataloader"), ("module", "the data module")])
def test_places_of_ranks_that_the_checkpoint_leaves_out_are_reported_once(resumed, kind, whose):
    seen, (warned,) = resumed(kind)
    assert len(set(seen)) == STOP * BATCH * RANKS + (STEPS - STOP) * BATCH, "all continue with rank 0's samples"
    assert f"The checkpoint holds rank 0's state of {whose}: " in warned
    assert "checkpoint_replicas=True" in warned


@pytest.mark.pairwise
@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("kind", ["torchdata", "torchdata sampler", "torchdata sampler, workers"])
def test_loaders_that_count_batches_resume_with_each_sample_once(resumed, kind, replicas):
    seen, warned = resumed(kind, replicas=replicas)
    check_each_once(seen)
    assert warned == []


def test_a_loader_that_counts_batches_resumes_in_the_second_epoch(resumed):
    check_each_once(resumed("torchdata sampler", stop=STEPS + STOP, epochs=2)[0], epochs=2)


def test_a_shuffled_order_that_no_checkpoint_holds_is_reported(resumed):
    _, (warned,) = resumed("torchdata shuffle")  # also with sidecars, see _lightning/test_places
    assert "StatefulDataLoader draws another order" in warned
    assert "DistributedSampler(dataset, num_replicas=..., rank=...)" in warned

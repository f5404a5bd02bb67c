"""Sharded nodes: buffers that are left out of averages, and writes in validation hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from model_parallel.conftest import trainer, whole_state
from model_parallel.sharded import Net
from problems import warnings_with

from lightning_hiercomm import AllReduce, HierarchicalModelParallelStrategy, PeriodicAveraging

SCHEMES = {"all_reduce": AllReduce(), "periodic": PeriodicAveraging(4, at_epoch_end=False)}


class Own(Net):
    """Keeps a bank of another length on every rank; writes its last bias in its second validation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(4))
        self.register_buffer("best", torch.zeros(1))
        self.validations = 0
        self.started: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.bank = torch.full((self.global_step + 2 * self.global_rank + 1,), float(self.global_rank))
        return super().training_step(batch, batch_idx)

    def on_validation_end(self) -> None:
        self.validations += 1
        if self.validations == 2:
            for parameter in self.net[-1].parameters():
                parameter.data.fill_(3.0)

    def on_train_batch_start(self, *_: object) -> None:
        state = whole_state(self)
        self.started.append((self.validations, state["net.5.weight"], state["net.0.weight"]))


def _program(folder: Path) -> dict[str, Any]:
    said = {}
    for name, scheme in SCHEMES.items():
        module = Own()
        saves = ModelCheckpoint(folder / name, save_last=True)
        strategy = HierarchicalModelParallelStrategy(
            scheme, ranks_per_node=2, save_distributed_checkpoint=False, average_buffers=["best"]
        )
        more = {"callbacks": [saves], "enable_checkpointing": True, "val_check_interval": 3}
        with warnings_with("what was written to the averaged model") as warned:
            trainer(strategy, **more).fit(module)
        said[name] = {
            "started": module.started,
            "bank": module.bank.tolist(),
            "saved": torch.load(saves.last_model_path, weights_only=True)["state_dict"]["bank"].tolist(),
            "end": whole_state(module)["net.0.weight"],
            "warned": warned,
        }
    return said


@pytest.fixture(scope="module")
def ranks(borrow: Any) -> list[dict[str, Any]]:
    return borrow(_program, 4)


@pytest.mark.parametrize("name", SCHEMES)
def test_banks_of_other_lengths_stay_each_ranks_own_in_sharded_nodes(ranks, name):
    for rank, said in enumerate(ranks):
        assert said[name]["bank"] == [float(rank)] * (2 * rank + 12)
        assert said[name]["saved"] == [0.0] * 12
        assert torch.equal(said[name]["end"], ranks[0][name]["end"])


@pytest.mark.parametrize("name", SCHEMES)
def test_sharded_nodes_undo_what_a_validation_hook_writes_to_the_averaged_model(ranks, name):
    for rank, said in enumerate(ranks):
        assert len(said[name]["warned"]) == (rank == 0)
        first = next(place for place, (done, *_) in enumerate(said[name]["started"]) if done == 2)
        _, weight, _ = said[name]["started"][first]
        assert not torch.equal(weight, torch.full_like(weight, 3.0))

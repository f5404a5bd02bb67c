"""Places in the data: what Lightning saves of loaders and data modules, and which samplers it wraps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from _lightning.conftest import quiet
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.data_connector import _get_distributed_sampler
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from problems import Stream
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from lightning_hiercomm._lightning.places import (
    begin_stateful_loader,
    drop_places,
    lost_places,
    restores_module,
)
from lightning_hiercomm._lightning.state_transfer import note_stage_of_dataloaders


class Loader(DataLoader):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Module(pl.LightningDataModule):
    def state_dict(self) -> dict[str, Any]:
        return {"at": 1}


class MyRandomSampler(Sampler):
    def __iter__(self):
        return iter(range(4))

    def __len__(self):
        return 4


def trainer_with(loader: object, datamodule: object = None) -> Any:
    loop = SimpleNamespace(_combined_loader=CombinedLoader(loader))
    return SimpleNamespace(fit_loop=loop, datamodule=datamodule)


def saved(state: object) -> dict[str, Any]:
    return {"loops": {"fit_loop": {"state_dict": {"combined_loader": [state]}}}, "Module": {"at": 1}}


def test_only_loaders_and_modules_with_a_state_of_their_own_have_a_place():
    def lost(*of: object, has_sidecars: bool = False, world_size: int = 2, have_equal_data: bool = True) -> list[str]:
        trainer = trainer_with(*of)
        trainer.is_last_batch, trainer.world_size = False, world_size
        return [*lost_places(trainer, has_sidecars, have_equal_data)]

    assert lost(DataLoader([1]), pl.LightningDataModule()) == []
    counts = Loader([1], sampler=DistributedSampler([1], 2, 0))
    assert lost(counts) == []
    assert "rank 0's state of a train dataloader" in lost(counts, have_equal_data=False)[0]
    assert lost(Loader([1]), Module(), has_sidecars=True) == lost(Loader([1]), Module(), world_size=1) == []
    (both,) = lost([Loader([1]), Loader([1])], Module())
    assert "rank 0's state of a train dataloader and of the data module" in both


def test_an_order_drawn_by_a_wrapped_sampler_is_known():
    def lost(kind: type, sampler: Any, is_last_batch: bool = False) -> list[str]:
        wrapped = _get_distributed_sampler(
            DataLoader([1] * 4, sampler=sampler), True, 0, mode=RunningStage.TRAINING, num_replicas=2, rank=0
        )
        trainer = trainer_with(kind([1] * 4, sampler=wrapped))
        trainer.is_last_batch, trainer.world_size = is_last_batch, 2
        return [*lost_places(trainer, has_sidecars=True, have_equal_data=True)]

    (warning,) = lost(Loader, MyRandomSampler())
    assert "Loader draws another order" in warning
    assert lost(DataLoader, MyRandomSampler()) == lost(Loader, MyRandomSampler(), is_last_batch=True) == []
    assert lost(Loader, None) == [], "Lightning gives torch's samplers a seed"


def test_only_stateful_loaders_get_their_epoch_early():
    for kind, epoch in ((DataLoader, 0), (Loader, 3)):
        sampler = DistributedSampler([1] * 4, 2, 0)
        begin_stateful_loader(kind([1] * 4, sampler=sampler), 3)
        assert sampler.epoch == epoch


def test_a_state_without_places_gives_a_data_module_its_own():
    checkpoint = saved({"at": 1})
    drop_places(checkpoint)
    assert checkpoint["loops"] == {"fit_loop": {"state_dict": {}}}
    assert restores_module(trainer_with(Loader([1]), Module()), checkpoint)
    assert not restores_module(trainer_with(Loader([1]), pl.LightningDataModule()), checkpoint)


@pytest.mark.parametrize(("kind", "warns"), [(DataLoader, False), (Loader, True)])
def test_a_stream_that_starts_again_on_a_joining_node_is_reported(kind, warns, recwarn):
    trainer = quiet(strategy=SingleDeviceStrategy())
    note_stage_of_dataloaders(trainer, [None], lambda: 3)
    trainer._data_connector._prepare_dataloader(kind(Stream(range(4))), False, RunningStage.TRAINING)
    assert any("starts at the beginning of its stream" in str(each.message) for each in recwarn) is warns

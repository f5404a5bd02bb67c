"""Step times of a LightningModule by itself, and the module that a person names."""

from __future__ import annotations

import sys

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_hiercomm.planning.cluster import PlanningError
from lightning_hiercomm.planning.measure.ranks import connected
from lightning_hiercomm.planning.measure.steps import StandIn, load_module, time_steps

CPU = torch.device("cpu")
SOURCE = """
import torch
import lightning.pytorch as pl
from torch.utils.data import DataLoader


class Examples(pl.LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.layer = torch.nn.Linear(width, 3)
        self.frozen = torch.nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, x):
        return {"logits": self.layer(x)}

    def configure_optimizers(self):
        return torch.optim.SGD([self.layer.weight, self.layer.bias], lr=0.1, momentum=0.9)


class Loaded(Examples):
    def __init__(self, width: int):
        super().__init__(width)

    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0)
        return self(batch)["logits"].sum()

    def train_dataloader(self):
        return DataLoader(torch.randn(6, self.layer.in_features), batch_size=2)


class Nothing(pl.LightningModule):
    pass


class NoModule:
    pass
"""


@pytest.fixture(autouse=True)
def _named(tmp_path, monkeypatch):
    (tmp_path / "models_of_a_person.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("models_of_a_person", None)


def test_a_stand_in_has_about_as_many_parameters_as_asked_for():
    for parameters in (1e3, 1e5, 1e7):
        made = StandIn(parameters)
        assert sum(p.numel() for p in made.parameters()) == pytest.approx(parameters, rel=0.15)


def test_a_step_is_timed_in_its_parts():
    times = time_steps(StandIn(1e4), None, CPU, seconds=0.05)
    assert min(times.forward, times.backward, times.update) > 0
    assert times.seconds == pytest.approx(times.forward + times.backward + times.update)
    assert times.processor_seconds > 0
    assert (times.bytes_per_parameter, times.state_per_parameter) == (4, 2)


def test_a_module_trains_on_its_own_batches_epoch_after_epoch():
    module = load_module("models_of_a_person:Loaded", '{"width": 4}')
    times = time_steps(module, None, CPU, seconds=0.05)
    assert times.seconds > 0
    assert times.parameters == 3 * 4 + 3  # without the frozen ones
    assert times.state_per_parameter == 1


class Gan(pl.LightningModule):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch).sum())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD([self.layer.weight], lr=0.1), torch.optim.SGD([self.layer.bias], lr=0.1)]


def test_a_step_with_several_backward_passes_is_timed():
    times = time_steps(Gan(), DataLoader(torch.randn(64, 2), batch_size=2), CPU, seconds=0.05)
    assert min(times.forward, times.backward, times.update) > 0


class Steps(StandIn):
    taken = 0

    def on_train_batch_start(self, batch, batch_idx):
        self.taken += 1
        assert isinstance(self.trainer.strategy.model, DistributedDataParallel)


def test_an_averaging_step_is_timed_for_the_given_number_of_steps():
    module = Steps(1e3)
    with connected() as ranks:
        times = time_steps(module, None, CPU, seconds=60.0, average_in=ranks.topology, steps=9)
    assert times.seconds > 0
    assert module.taken == 9


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("models_of_a_person", None, "must look like package.module:name"),
        ("no_such_module:Class", None, "cannot be imported: No module named"),
        ("models_of_a_person:Missing", None, "cannot be imported"),
        ("models_of_a_person:Loaded", None, "give its arguments with --module-args"),
        ("models_of_a_person:Loaded", "{", "--module-args is not JSON"),
        ("models_of_a_person:Loaded", "[1]", "must be a JSON object"),
        ("models_of_a_person:NoModule", None, "is not a LightningModule"),
        ("models_of_a_person:Nothing", None, "has no train_dataloader"),
    ],
)
def test_modules_that_cannot_be_trained_are_refused(path, arguments, message):
    with pytest.raises(PlanningError, match=message):
        load_module(path, arguments)

"""Plain checkpoints, which go from anywhere to anywhere, and those that resume to the bit."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from problems import Net, Quadratic, one_trainer, same_bits

from lightning_hiercomm.schemes import SCHEMES

HERE = "here"
PLACES = {
    "one device": ("auto", 1),
    "DDP": (DDPStrategy, 4),
    "four nodes of one rank": ({"ranks_per_node": 1}, 4),
    "one node of two ranks": ({"ranks_per_node": 2}, 2),
    "nodes of one rank and three": ({"ranks_per_node": [1, 3]}, 4),
}


@pytest.fixture
def train(fit, scheme, tmp_path):
    """Train up to an epoch in a place, from a checkpoint or from none, and write a checkpoint."""

    def run(place, epochs, make=Quadratic, folder=tmp_path, resume=None):
        strategy, devices = PLACES.get(place, ({}, 4))
        if strategy is DDPStrategy:
            strategy = DDPStrategy(start_method="fork")
        elif isinstance(strategy, dict):
            strategy = {**strategy, "scheme": scheme}
        return fit(
            make(),
            strategy,
            devices=devices,
            max_epochs=epochs,
            callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
            enable_checkpointing=True,
            num_sanity_val_steps=0,
            fit_arguments={"ckpt_path": resume},
        )

    return run


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def trained(train, scheme_name, checkpoints):
    """The checkpoint of two epochs in a place; the tests share it."""

    def checkpoint(place):
        has_scheme = place not in ("one device", "DDP")
        folder = checkpoints / (f"{scheme_name}, {place}" if has_scheme else place)
        if not folder.exists():
            train(place, 2, folder=folder)
        return folder / "epoch=1.ckpt"

    return checkpoint


@pytest.fixture
def uninterrupted(tmp_path):
    module = Quadratic()
    one_trainer(tmp_path, max_epochs=4).fit(module)
    return module.state_dict()


def ends_as_if_uninterrupted(reports, uninterrupted):
    same_bits(reports)
    for name, expected in uninterrupted.items():
        torch.testing.assert_close(reports[0]["state_dict"][name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.feature("plain checkpoint: load with weights_only=True, anywhere, and the other way round")
@pytest.mark.parametrize("place", PLACES)
def test_a_plain_checkpoint_is_resumed_elsewhere(train, trained, uninterrupted, place):
    reports = train(place, 4, resume=trained(HERE))
    ends_as_if_uninterrupted(reports, uninterrupted)


@pytest.mark.feature("plain checkpoint: load with weights_only=True, anywhere, and the other way round")
@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_from_elsewhere_is_resumed_here(train, trained, uninterrupted, place):
    reports = train(HERE, 4, resume=trained(place))
    ends_as_if_uninterrupted(reports, uninterrupted)


class Momentum(Quadratic):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.feature("plain checkpoint: load with weights_only=True, anywhere, and the other way round")
def test_a_plain_checkpoint_is_what_lightning_writes(train, tmp_path):
    train(HERE, 1, Momentum)
    ours = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    train("one device", 2, Momentum)
    one = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    assert set(ours) - set(one) == {"hiercomm"}
    assert set(one) <= set(ours)
    assert ours["state_dict"].keys() == one["state_dict"].keys()
    momenta, expected = (saved["optimizer_states"][0]["state"] for saved in (ours, one))
    assert momenta.keys() == expected.keys()
    for parameter, state in expected.items():
        assert momenta[parameter]["momentum_buffer"].shape == state["momentum_buffer"].shape
        assert momenta[parameter]["momentum_buffer"].abs().min() > 0
    Quadratic.load_from_checkpoint(tmp_path / "epoch=0.ckpt", weights_only=True)


@pytest.mark.feature("plain checkpoint: saved between two agreements, in mid-epoch")
def test_a_plain_checkpoint_of_mid_epoch(fit, scheme, tmp_path):
    def run(strategy, devices, folder, resume):
        return fit(
            Quadratic(),
            strategy,
            devices=devices,
            max_epochs=2,
            callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=9, save_top_k=-1)],
            enable_checkpointing=True,
            num_sanity_val_steps=0,
            fit_arguments={"ckpt_path": folder / "step=9.ckpt"} if resume else None,
        )

    for resume in (False, True):
        ours = run({"scheme": scheme}, 4, tmp_path / "ours", resume)
        (one,) = run("auto", 1, tmp_path / "one", resume)
    same_bits(ours)
    for name, expected in one["state_dict"].items():
        torch.testing.assert_close(ours[0]["state_dict"][name], expected, rtol=1e-5, atol=1e-6)


AS_PUBLISHED = {
    "periodic": {"sync_every": 4},
    "daso": {"sync_every": 3, "staleness": 2, "warmup_epochs": 0, "cooldown_epochs": 0},
    "steps_delay": {"delay": 3, "warmup_steps": 3},
    "gossip": {"segments": 3, "overlap": True},
}


class Dropped(Net):
    """Dropout, momentum, BatchNorm, and samples that depend on rank and step only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6)

    def training_step(self, batch, batch_idx):
        generator = torch.Generator().manual_seed(10 * self.trainer.global_step + self.global_rank)
        x = torch.nn.functional.dropout(self.norm(torch.randn(4, 6, generator=generator)))
        return torch.nn.functional.cross_entropy(self.layers(x), torch.arange(4) % 3)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.feature("checkpoint_replicas=True: resume to the bit, from any step")
def test_resume_to_the_bit(fit, scheme_name, tmp_path):
    scheme = SCHEMES[scheme_name](**AS_PUBLISHED.get(scheme_name, {}))
    steps = (3, 4, 5, 6, 8)

    def run(callbacks, resume=None):
        return fit(
            Dropped(),
            {"scheme": scheme, "checkpoint_replicas": True},
            max_epochs=2,
            callbacks=callbacks,
            enable_checkpointing=True,
            fit_arguments={"ckpt_path": resume},
            use_distributed_sampler=False,
        )

    def saves_at(step):
        return ModelCheckpoint(tmp_path / str(step), "{step}", every_n_train_steps=step, save_top_k=-1)

    whole = run([saves_at(step) for step in steps])
    same_bits(whole)
    for step in steps:
        resumed = run([saves_at(step)], tmp_path / str(step) / f"step={step}.ckpt")
        for before, after in zip(whole, resumed, strict=True):
            for name, expected in before["state_dict"].items():
                assert torch.equal(after["state_dict"][name], expected), (step, name)

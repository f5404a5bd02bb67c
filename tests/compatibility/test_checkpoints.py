"""Plain checkpoints, which go from anywhere to anywhere, and those that resume to the bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from compatibility.conftest import EXACT, scheme_of
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from problems import Net, Quadratic, one_trainer, report_of, same_bits

from lightning_hiercomm import HierarchicalStrategy
from lightning_hiercomm.schemes import SCHEMES

HERE = "two nodes of two ranks"
PLACES = {
    "one device": (None, 1),
    "DDP": (None, 4),
    "four nodes of one rank": (1, 4),
    "one node of two ranks": (2, 2),
    "nodes of one rank and three": ([1, 3], 4),
    HERE: (2, 4),
}


def on_push(*kept: str) -> list[Any]:
    """All other places; on a push those that are named, because tests/checkpoints has all layouts on threads."""
    marks = {place: [] if place in kept else [pytest.mark.nightly] for place in PLACES if place != HERE}
    return [pytest.param(place, marks=marks[place]) for place in marks]


def _train(folder, name, place, epochs, resume=None):
    """Train up to an epoch under a scheme in a place; a checkpoint of every epoch goes to ``folder``."""
    ranks_per_node, devices = PLACES[place]
    strategy = "auto"
    if ranks_per_node is not None:
        strategy = HierarchicalStrategy(SCHEMES[name](**EXACT.get(name, {})), ranks_per_node=ranks_per_node)
    elif devices > 1:
        strategy = DDPStrategy()
    saves = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    arguments = {"max_epochs": epochs, "callbacks": [saves], "enable_checkpointing": True}
    trainer = one_trainer(folder, devices=devices, strategy=strategy, **arguments)
    trainer.fit(Quadratic(), ckpt_path=resume)
    return report_of(trainer)


@pytest.fixture(scope="module")
def resumed(borrow, tmp_path_factory, request):
    """``resumed(scheme)``: an epoch in every place, and one more elsewhere; what all ranks report of those.

    By where they were saved, and where resumed; as far as there are tests that ask for it.
    """
    folder = tmp_path_factory.mktemp("checkpoints")

    def saved(name: str, place: str) -> Path:
        ranks_per_node, _ = PLACES[place]
        return folder / ("any" if ranks_per_node is None else name) / place / "epoch=0.ckpt"

    def save(name: str, place: str) -> None:
        path = saved(name, place)
        if not path.exists():
            _train(path.parent, name, place, 1)

    def resume(name: str, source: str, target: str) -> dict:
        return _train(folder / "resumed" / name / source / target, name, target, 2, saved(name, source))

    @functools.cache
    def under(name: str) -> dict:
        two, one = "one node of two ranks", "one device"
        asked = [item for item in request.session.items if item.path == request.path and scheme_of(item) == name]
        to = {item.callspec.params["place"] for item in asked if item.originalname == RESUMED_ELSEWHERE}
        since = {item.callspec.params["place"] for item in asked if item.originalname == RESUMED_HERE}

        def on_four(_: Path) -> dict:
            for place in {*(since - {one, two}), HERE}:
                save(name, place)
            ways = [(HERE, place) for place in to - {one, two}] + [(place, HERE) for place in since]
            return {way: resume(name, *way) for way in sorted(ways)}

        if one in since:
            save(name, one)
        if two in since:
            borrow(lambda _: save(name, two), ranks=2)
        reports = borrow(on_four)
        results = {way: [returned[way] for returned in reports] for way in reports[0]}
        if two in to:
            results[HERE, two] = borrow(lambda _: resume(name, HERE, two), ranks=2)
        if one in to:
            results[HERE, one] = [resume(name, HERE, one)]
        return results

    return under


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    module = Quadratic()
    one_trainer(tmp_path_factory.mktemp("uninterrupted")).fit(module)
    return module.state_dict()


RESUMED_ELSEWHERE = "test_a_plain_checkpoint_is_resumed_elsewhere"
RESUMED_HERE = "test_a_checkpoint_from_elsewhere_is_resumed_here"


def ends_as_if_uninterrupted(reports, uninterrupted):
    same_bits(reports)
    for name, expected in uninterrupted.items():
        torch.testing.assert_close(reports[0]["state_dict"][name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long("a fit, and its resume on other ranks")
@pytest.mark.feature("plain checkpoint: load with weights_only=True, anywhere, and the other way round")
@pytest.mark.parametrize("place", on_push("DDP", "nodes of one rank and three"))
def test_a_plain_checkpoint_is_resumed_elsewhere(resumed, scheme_name, uninterrupted, place):
    ends_as_if_uninterrupted(resumed(scheme_name)[HERE, place], uninterrupted)


@pytest.mark.feature("plain checkpoint: load with weights_only=True, anywhere, and the other way round")
@pytest.mark.parametrize("place", on_push("DDP", "nodes of one rank and three"))
def test_a_checkpoint_from_elsewhere_is_resumed_here(resumed, scheme_name, uninterrupted, place):
    ends_as_if_uninterrupted(resumed(scheme_name)[place, HERE], uninterrupted)


class Momentum(Quadratic):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.feature("plain checkpoint: load with weights_only=True, anywhere, and the other way round")
def test_a_plain_checkpoint_equals_lightnings(on_ranks, tmp_path):
    def main(trainer, rank):
        saves = ModelCheckpoint(tmp_path / "saved", filename="{epoch}", save_top_k=-1)
        trainer = trainer(max_epochs=1, callbacks=[saves], enable_checkpointing=True)
        trainer.fit(Momentum())
        trainer.strategy.barrier()
        Quadratic.load_from_checkpoint(saves.best_model_path, weights_only=True)
        return torch.load(saves.best_model_path, weights_only=True)

    ours, *_ = on_ranks(main)
    one = main(lambda **arguments: one_trainer(tmp_path, **arguments), 0)
    assert set(ours) - set(one) == {"hiercomm"}
    assert set(one) <= set(ours)
    assert ours["state_dict"].keys() == one["state_dict"].keys()
    momenta, expected = (saved["optimizer_states"][0]["state"] for saved in (ours, one))
    assert momenta.keys() == expected.keys()
    for parameter, state in expected.items():
        assert momenta[parameter]["momentum_buffer"].shape == state["momentum_buffer"].shape
        assert momenta[parameter]["momentum_buffer"].abs().min() > 0


@pytest.mark.long("a fit that is broken off in mid-epoch, and its resume")
@pytest.mark.feature("plain checkpoint: saved between two synchronizations, in mid-epoch")
def test_a_plain_checkpoint_of_mid_epoch(on_ranks, tmp_path):
    def main(trainer, rank):
        saves = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=5, save_top_k=-1)
        trainer(callbacks=[saves], enable_checkpointing=True).fit(Quadratic())
        resumed = trainer()
        resumed.fit(Quadratic(), ckpt_path=saves.best_model_path)
        assert resumed.global_step == 8
        return report_of(resumed)

    ours, one = on_ranks(main), main(lambda **arguments: one_trainer(tmp_path, **arguments), 0)
    same_bits(ours)
    for name, expected in one["state_dict"].items():
        torch.testing.assert_close(ours[0]["state_dict"][name], expected, rtol=1e-5, atol=1e-6)


AS_PUBLISHED = {
    "periodic": {"sync_every": 4},
    "daso": {"sync_every": 3, "staleness": 2, "warmup": 0, "cooldown": 0},
    "steps_delay": {"delay": 3, "warmup_steps": 3},
    "gossip": {"fragments": 3, "overlap": True},
}


class Dropped(Net):
    """Dropout, noise that comes with the batch, momentum, BatchNorm; samples depend on rank and step only."""

    def __init__(self) -> None:
        super().__init__(steps=6)
        self.norm = torch.nn.BatchNorm1d(6)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.noise = torch.randn(4, 6)
        return batch

    def training_step(self, batch, batch_idx):
        generator = torch.Generator().manual_seed(10 * self.trainer.global_step + self.global_rank)
        x = torch.randn(4, 6, generator=generator) + 0.1 * self.noise
        x = torch.nn.functional.dropout(self.norm(x))
        return torch.nn.functional.cross_entropy(self.layers(x), torch.arange(4) % 3)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def resumed_exactly(borrow, tmp_path_factory, request):
    """``resumed_exactly(scheme)``: what all ranks report of a whole run, and of it resumed after the steps of tests."""
    folder = tmp_path_factory.mktemp("exact")

    @functools.cache
    def under(name: str) -> list[dict]:
        asked = [item for item in request.session.items if item.path == request.path and scheme_of(item) == name]
        steps = sorted({item.callspec.params["step"] for item in asked if "step" in item.callspec.params})

        def run(callbacks, resume=None):
            scheme = SCHEMES[name](**AS_PUBLISHED.get(name, {}))
            strategy = HierarchicalStrategy(scheme, ranks_per_node=2, checkpoint_replicas=True)
            arguments = {"callbacks": callbacks, "enable_checkpointing": True, "use_distributed_sampler": False}
            trainer = one_trainer(folder, devices=4, strategy=strategy, **arguments)
            trainer.fit(Dropped(), ckpt_path=resume)
            return report_of(trainer)

        def saves_at(step):
            return ModelCheckpoint(folder / name / str(step), "{step}", every_n_train_steps=step, save_top_k=-1)

        def main(_: Path) -> dict:
            results = {"whole": run([saves_at(step) for step in steps])}
            for step in steps:
                results[step] = run([saves_at(step)], folder / name / str(step) / f"step={step}.ckpt")
            return results

        return borrow(main)

    return under


@pytest.mark.feature("checkpoint_replicas=True: resume to the bit, from any step")
@pytest.mark.parametrize("step", [5, *(pytest.param(step, marks=pytest.mark.nightly) for step in (3, 4, 6, 8))])
def test_resume_to_the_bit(resumed_exactly, scheme_name, step):
    reports = resumed_exactly(scheme_name)
    same_bits([results["whole"] for results in reports])
    for results in reports:
        for name, expected in results["whole"]["state_dict"].items():
            assert torch.equal(results[step]["state_dict"][name], expected), name

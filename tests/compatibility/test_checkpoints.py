"""Plain checkpoints, which go from anywhere to anywhere, and those that resume to the bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from pairwise import on_push
from problems import Quadratic, SaveAfterEpoch, one_trainer, report_of, same_bits
from trainer_combinations import Fit, check

from lightning_hiercomm import Epochs, HierarchicalStrategy

HERE = "two nodes of two ranks"
PLACES = {
    "one device": (None, 1),
    "DDP": (None, 4),
    "four nodes of one rank": (1, 4),
    "one node of two ranks": (2, 2),
    "nodes of one rank and three": ([1, 3], 4),
    HERE: (2, 4),
}
WAYS = [way for place in PLACES if place != HERE for way in ((HERE, place), (place, HERE))]


@pytest.fixture
def trained(borrow, scheme, tmp_path):
    """``trained(place, epochs, resume=None)``: the reports of all ranks of a place; saves ``first.ckpt`` there."""

    def run(place: str, epochs: int, resume: Any = None) -> list[dict[str, Any]]:
        ranks_per_node, devices = PLACES[place]

        def main(_: Any = None) -> dict[str, Any]:
            strategy: Any = DDPStrategy() if devices > 1 else "auto"
            if ranks_per_node is not None:
                strategy = HierarchicalStrategy(scheme, ranks_per_node=ranks_per_node)
            saves = SaveAfterEpoch(tmp_path / "first.ckpt")
            trainer = one_trainer(tmp_path, devices=devices, strategy=strategy, max_epochs=epochs, callbacks=[saves])
            trainer.fit(Quadratic(), ckpt_path=resume)
            return report_of(trainer)

        return [main()] if devices == 1 else borrow(main, devices)

    return run


@pytest.mark.long("a fit, and its resume on other ranks")
@pytest.mark.feature("plain checkpoint: load with weights_only=True, anywhere, and the other way round")
@pytest.mark.parametrize("way", on_push(WAYS, *WAYS[2:4], *WAYS[8:]), ids=" to ".join)
def test_a_plain_checkpoint_is_resumed_anywhere(trained, tmp_path, way):
    source, target = way
    trained(source, 1)
    reports = trained(target, 2, tmp_path / "first.ckpt")
    same_bits(reports)
    module = Quadratic()
    one_trainer(tmp_path).fit(module)
    torch.testing.assert_close(reports[0]["state_dict"], module.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.feature("plain checkpoint: load with weights_only=True, anywhere, and the other way round")
def test_a_plain_checkpoint_equals_lightnings(on_ranks, tmp_path):
    def main(trainer):
        saves = ModelCheckpoint(tmp_path / "saved", filename="{epoch}", save_top_k=-1)
        trainer = trainer(max_epochs=1, callbacks=[saves], enable_checkpointing=True)
        trainer.fit(Quadratic(momentum=0.9))
        trainer.strategy.barrier()
        Quadratic.load_from_checkpoint(saves.best_model_path, weights_only=True)
        return torch.load(saves.best_model_path, weights_only=True)

    ours, *_ = on_ranks(main)
    one = main(partial(one_trainer, tmp_path))
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
    def main(trainer):
        saves = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=5, save_top_k=-1)
        trainer(callbacks=[saves], enable_checkpointing=True).fit(Quadratic())
        resumed = trainer()
        resumed.fit(Quadratic(), ckpt_path=saves.best_model_path)
        assert resumed.global_step == 8
        return report_of(resumed)

    ours, one = on_ranks(main), main(partial(one_trainer, tmp_path))
    same_bits(ours)
    torch.testing.assert_close(ours[0]["state_dict"], one["state_dict"], rtol=1e-5, atol=1e-6)


AS_PUBLISHED = {
    "periodic": {"sync_every": 4},
    "daso": {"sync_every": 3, "staleness": 2, "warmup": Epochs(0), "cooldown": Epochs(0)},
    "steps_delay": {"delay": 3, "warmup_steps": 3},
    "gossip": {"fragments": 3, "overlap": True},
}


@pytest.mark.feature("checkpoint_replicas=True: resume to the bit, from any step")
@pytest.mark.parametrize("step", on_push([3, 4, 5, 6, 8], 5))
def test_resume_to_the_bit(scheme_name, step):
    arguments = AS_PUBLISHED.get(scheme_name, {})
    check(Fit(scheme_name, arguments, "2x2", optimizer="momentum", steps=6, module=("batchnorm", "noise"), resume=step))

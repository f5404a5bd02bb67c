"""The hooks that strategies share, before anything is set up."""

from __future__ import annotations

import logging
import os
import pickle
from types import FunctionType

import pytest
import torch.distributed as dist
from fits import fit_here, our_warnings
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_utilities.core import rank_zero
from problems import Oracle, one_trainer, warnings_with

from lightning_hiercomm import (
    DiLoCo,
    HierarchicalFabricStrategy,
    HierarchicalModelParallelStrategy,
    HierarchicalStrategy,
    PeriodicAveraging,
    StepsDelay,
)
from lightning_hiercomm.trainer import hooks


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: s.node_process_group, "there is no topology yet: it is set up by Strategy.setup_environment"),
        (lambda s: s.on_train_batch_start(None, 1) or s.on_train_end() or s._run, "there is no training run yet"),  # noqa: SLF001
        (lambda s: s.on_train_start(), "there is no LightningModule yet: it is set up by Strategy.connect"),
        (lambda s: s.configure_ddp(), "there is no LightningModule yet"),
        (lambda s: s._configure_launcher(), "there is no cluster environment yet"),
    ],
)
def test_reading_before_setup_names_the_missing_step(ask, message):
    with pytest.raises(RuntimeError, match=message):
        ask(HierarchicalStrategy())


def test_large_worlds_connect_lazily_with_enough_open_files(fit, monkeypatch):
    # torch before 2.8 connects all pairs of ranks, and a user may have said so himself
    init, lazy, raised = dist.init_process_group, [], []

    def noting(*args, **settings):
        lazy.append(os.environ.get("TORCH_GLOO_LAZY_INIT"))
        return init(*args, **settings)

    class Noting(Oracle):
        def on_train_end(self):
            self.report = [*lazy, os.environ.get("TORCH_GLOO_LAZY_INIT")], raised

    monkeypatch.setattr(dist, "init_process_group", noting)
    monkeypatch.setattr(hooks, "MOST_IN_MESH", 1)
    monkeypatch.setattr(hooks, "raise_limit_on_open_files", lambda: raised.append(True))
    for report in fit(Noting(2), {"scheme": PeriodicAveraging(2), "ranks_per_node": 1}, devices=2, forked=True):
        assert report["report"] == (["1", None], [True])


def test_before_a_run_reports_are_empty():
    strategy = pickle.loads(pickle.dumps(HierarchicalStrategy()))
    assert strategy.communication() == {"synchronizations": 0.0, "steps": 0.0}
    assert (strategy.schemes, strategy.topology, strategy.history()) == ([], None, [])
    with strategy.averaged_model():
        pass
    strategy.on_validation_start()
    strategy.on_validation_end()


STRATEGIES = [HierarchicalStrategy, HierarchicalModelParallelStrategy, HierarchicalFabricStrategy]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_has_few_classes_and_they_precede_lightnings(strategy):
    own = [cls for cls in strategy.__mro__ if cls.__module__.startswith("lightning_hiercomm")]
    assert len(own) <= 4
    assert [*strategy.__mro__[: len(own)]] == own
    for cls in own:
        assert sum(isinstance(value, FunctionType | property | classmethod) for value in vars(cls).values()) <= 25
    assert strategy().communication() == {"synchronizations": 0.0, "steps": 0.0}


@pytest.mark.parametrize(
    ("scheme", "limits", "warned"),
    [
        (StepsDelay(warmup_steps=8), {"max_epochs": 2}, "none is delayed"),
        (StepsDelay(warmup_steps=4), {"max_epochs": 2}, None),
        (StepsDelay(warmup_steps=4), {"max_epochs": 2, "accumulate_grad_batches": 2}, "none is delayed"),
        (StepsDelay(warmup_steps=4), {"max_steps": 3}, "none is delayed"),
        (StepsDelay(warmup_steps=4), {"max_steps": 5, "max_epochs": 5}, None),
        (
            DiLoCo(9),
            {"max_epochs": 2},
            "DiLoCo(sync_every=9) synchronizes nodes every 9 optimizer steps, but the run ends after 8",
        ),
        (DiLoCo(8), {"max_epochs": 2}, None),
        (PeriodicAveraging(4, warmup_steps=8), {"max_epochs": 1}, "after 4 optimizer steps: nodes never train alone"),
        (PeriodicAveraging(4), {"max_epochs": 2}, None),
        (PeriodicAveraging(5), {"max_epochs": 2}, "which has 4 optimizer steps"),
    ],
)
def test_a_run_or_epoch_shorter_than_the_period_warns_once(scheme, limits, warned):
    strategy = HierarchicalStrategy(scheme, ranks_per_node=1)
    trainer = one_trainer(None, strategy=strategy, limit_train_batches=4, **{"max_epochs": None, **limits})
    with warnings_with("optimizer steps") as said:
        trainer.fit(BoringModel())
    assert len(said) == (warned is not None)
    assert all(warned in text for text in said)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (2, "2 nodes [0] [1] over torch; PeriodicAveraging(sync_every=2); 0.000264 MB of parameters and buffers"),
        (1, "there is one node, so PeriodicAveraging(sync_every=2) is plain data-parallel training"),
    ],
)
def test_a_run_logs_its_nodes_and_scheme_at_the_start(borrow, nodes, said):
    def begin(folder):
        heard, handler = [], logging.Handler()
        handler.emit = lambda record: heard.append(record.getMessage())
        logger = rank_zero.log  # the logger of whichever of Lightning's two packages was imported last
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        # when a progress bar has its line
        callbacks = [LambdaCallback(on_train_start=lambda *_: logger.removeHandler(handler))]
        sizes = {"ranks_per_node": 2 // nodes, "max_steps": 2}
        with our_warnings() as warned:
            fit_here(folder, BoringModel(), PeriodicAveraging(2), callbacks=callbacks, **sizes)
        return heard + warned

    first, _ = borrow(begin, ranks=2)
    assert sum(line.startswith(said) for line in first) == 1


def test_random_streams_of_a_file_are_not_put_back_in_the_next_run(tmp_path):
    """Nothing was trained in the one that read it: it had come to its last step."""
    saves = ModelCheckpoint(tmp_path, "saved", every_n_train_steps=2)
    strategy = HierarchicalStrategy(ranks_per_node=1, checkpoint_replicas=True)
    run = one_trainer(tmp_path, strategy=strategy, max_steps=2, callbacks=[saves], enable_checkpointing=True)
    run.fit(BoringModel())
    run.fit(BoringModel(), ckpt_path=tmp_path / "saved.ckpt")
    assert run.global_step == 2
    assert strategy._checkpoints.random_state is None  # noqa: SLF001

"""The second tree of classes: for programs that import `pytorch_lightning`."""

from __future__ import annotations

import ast
import inspect
import sys
import traceback

import lightning.pytorch
import pytest
import pytorch_lightning
import pytorch_lightning.cli
import torch
from pytorch_lightning.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

import lightning_hiercomm as first
import lightning_hiercomm.pytorch_lightning as second
from lightning_hiercomm.batches import speed
from lightning_hiercomm.pytorch_lightning import _second_tree

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def net(tree):
    """A module of that tree: ``report`` is the weight after each batch."""

    class Net(tree.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)
            torch.nn.init.constant_(self.layer.weight, 0.5)
            torch.nn.init.zeros_(self.layer.bias)

        def training_step(self, batch, batch_idx):
            return (self.layer(batch) - batch.sum()).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

        def train_dataloader(self):
            return DataLoader(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)), batch_size=4)

    return Net()


def trained(tree, ours, folder, fit_arguments=None, **arguments):
    """Every rank's weights after fit on two nodes of two ranks."""

    class Report(tree.Callback):
        def on_fit_end(self, trainer, pl_module):
            torch.save(pl_module.state_dict(), folder / f"rank-{trainer.global_rank}.pt")

    strategy = ours.HierarchicalStrategy(ranks_per_node=2, start_method="fork", **arguments)
    callbacks = [Report(), ours.CommunicationMonitor()]
    trainer = tree.Trainer(**QUIET, devices=4, strategy=strategy, max_epochs=2, callbacks=callbacks)
    trainer.fit(net(tree), **(fit_arguments or {}))
    trainer.save_checkpoint(folder / "last.ckpt")
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(4)]


def test_both_trees_have_equal_names_and_share_lightning_free_modules():
    assert second.__all__ == first.__all__
    for name in first.__all__:
        mine, theirs = getattr(first, name), getattr(second, name)
        if mine.__module__ in _second_tree.touching_lightning():
            assert theirs.__module__ == mine.__module__.replace("lightning_hiercomm", second.__name__)
        else:
            assert theirs is mine


def test_only_modules_that_use_lightning_exist_twice():
    rooms = {name.split(".")[1] for name in _second_tree.touching_lightning()}
    assert rooms == {"__main__", "_lightning", "checkpoints", "planning", "trainer"}
    assert first.HeterogeneousBatches is second.HeterogeneousBatches


def test_the_classes_belong_to_the_tree_that_they_are_imported_for():
    assert issubclass(second.HierarchicalStrategy, pytorch_lightning.strategies.DDPStrategy)
    assert not issubclass(second.HierarchicalStrategy, lightning.pytorch.strategies.DDPStrategy)
    assert issubclass(second.CommunicationMonitor, pytorch_lightning.Callback)


@pytest.mark.parametrize("scheme", ["periodic", "daso"])
def test_both_train_to_the_same_bits(tmp_path, capfd, scheme):
    expected = trained(lightning.pytorch, first, tmp_path, scheme=scheme)
    actual = trained(pytorch_lightning, second, tmp_path, scheme=scheme)
    assert capfd.readouterr().out.count("Communication of 8 optimizer steps on 4 ranks") == 2
    for mine, theirs in zip(expected, actual, strict=True):
        assert torch.equal(mine["layer.weight"], theirs["layer.weight"])


def test_batches_are_measured_and_divided(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(speed, "_BLOCK_SECONDS", 0.0)  # what comes out does not matter
    trained(pytorch_lightning, second, tmp_path, batches=second.HeterogeneousBatches(4))
    assert "A global batch of 4 samples on 4 ranks" in capfd.readouterr().out


@pytest.mark.long("spawned processes import Lightning and its other tree")
@pytest.mark.usefixtures("spawns_forks")
def test_a_spawned_process_finds_the_second_tree():
    strategy = second.HierarchicalStrategy(ranks_per_node=1, start_method="spawn")
    trainer = pytorch_lightning.Trainer(**QUIET, devices=2, strategy=strategy, max_steps=2)
    module = BoringModel()
    before = module.layer.weight.clone()
    trainer.fit(module)
    assert not torch.equal(module.layer.weight, before)


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical_daso"])
def test_names_are_registered_with_both(name):
    for tree, ours in ((lightning.pytorch, first), (pytorch_lightning, second)):
        assert type(tree.Trainer(**QUIET, strategy=name).strategy) is ours.HierarchicalStrategy


def test_yaml_names_the_class_of_the_second_tree(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program"])
    config = tmp_path / "config.yaml"
    config.write_text("""
trainer:
  accelerator: cpu
  logger: false
  strategy:
    class_path: lightning_hiercomm.pytorch_lightning.HierarchicalStrategy
    init_args:
      ranks_per_node: 1
      scheme: {class_path: lightning_hiercomm.PeriodicAveraging, init_args: {sync_every: 7}}
""")

    def built(path):
        arguments = ["--config", str(path)]
        return pytorch_lightning.cli.LightningCLI(BoringModel, run=False, args=arguments, save_config_callback=None)

    cli = built(config)
    saved = tmp_path / "saved.yaml"
    saved.write_text(cli.parser.dump(cli.config))
    strategy = built(saved).trainer.strategy
    assert type(strategy) is second.HierarchicalStrategy
    assert strategy.scheme.sync_every == 7
    assert "class_path: lightning_hiercomm.pytorch_lightning.HierarchicalStrategy\n" in saved.read_text()


def test_tracebacks_and_inspect_show_the_one_source_file():
    assert inspect.getsource(second.HierarchicalStrategy) == inspect.getsource(first.HierarchicalStrategy)
    with pytest.raises(RuntimeError, match="before the model is wrapped") as caught:
        second.HierarchicalStrategy()._register_ddp_hooks()
    source = inspect.getsourcefile(first.HierarchicalStrategy)
    frame = next(frame for frame in traceback.extract_tb(caught.tb) if frame.filename == source)
    lines, start = inspect.getsourcelines(first.HierarchicalStrategy)
    assert frame.line == lines[frame.lineno - start].strip()
    assert frame.line.startswith("raise RuntimeError(")


@pytest.mark.parametrize(
    ("tree", "wrong", "shown", "right"),
    [
        (
            lightning.pytorch,
            second,
            r"strategy=lightning_hiercomm\.pytorch_lightning\.HierarchicalStrategy\(",
            "`lightning.pytorch`, use `lightning_hiercomm.{}`",
        ),
        (
            pytorch_lightning,
            first,
            "`pytorch_lightning`, use `lightning_hiercomm.pytorch_lightning.HierarchicalStrategy`",
            "`pytorch_lightning`, use `lightning_hiercomm.pytorch_lightning.{}`",
        ),
    ],
)
def test_mixing_the_trees_raises_with_the_right_import(tree, wrong, shown, right):
    with pytest.raises(ValueError, match=shown):
        tree.Trainer(**QUIET, strategy=wrong.HierarchicalStrategy())
    trainer = tree.Trainer(**QUIET, callbacks=[wrong.CommunicationMonitor()])
    with pytest.raises(Exception, match=right.format("CommunicationMonitor")):
        trainer.fit(net(tree))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("import lightning.pytorch as pl", "import pytorch_lightning as pl"),
        ("from lightning.fabric.plugins import CheckpointIO", "from lightning_fabric.plugins import CheckpointIO"),
        (
            "from lightning_hiercomm.nodes.replica import Replica",
            "from lightning_hiercomm.nodes.replica import Replica",
        ),
        ("import lightning_utilities", "import lightning_utilities"),
        (
            "from lightning_hiercomm.trainer import hooks, options",
            "from lightning_hiercomm.pytorch_lightning.trainer import hooks\n"
            "from lightning_hiercomm.trainer import options",
        ),
        (
            "from lightning_hiercomm.trainer.strategy import HierarchicalStrategy as S",
            "from lightning_hiercomm.pytorch_lightning.trainer.strategy import HierarchicalStrategy as S",
        ),
    ],
)
def test_import_statements_point_to_the_second_tree(written, meant):
    assert ast.unparse(_second_tree._PointToSecondTree().visit(ast.parse(written))) == meant  # noqa: SLF001


@pytest.mark.parametrize("written", ["import lightning.pytorch", "from lightning import Trainer"])
def test_imports_that_cannot_be_pointed_there_are_refused(written):
    with pytest.raises(ImportError):
        _second_tree._PointToSecondTree().visit(ast.parse(written))  # noqa: SLF001


def test_a_module_that_exists_once_has_no_second_name():
    with pytest.raises(ModuleNotFoundError, match=r"pytorch_lightning\.schemes"):
        __import__("lightning_hiercomm.pytorch_lightning.schemes")

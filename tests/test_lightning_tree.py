"""Which of Lightning's two packages a process uses; each case in a process of its own, because imports decide."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long("a program imports torch and Lightning's other requirements")

_FORKS = """
import json, multiprocessing, os, runpy, sys, torch, torchmetrics
assert not {"lightning", "pytorch_lightning"} & {*sys.modules}
def main(arguments, environment, folder):
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = arguments
    runpy.run_path(arguments[0], run_name="__main__")
for line in sys.stdin:
    process = multiprocessing.get_context("fork").Process(target=main, args=json.loads(line))
    process.start()
    process.join()
    print(process.exitcode, flush=True)
"""

_SETUP = """
import importlib, json, os, sys, torch
from pathlib import Path
from torch.utils.data import DataLoader
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}

def net(pl):
    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(3, 1)
        def training_step(self, batch, batch_idx):
            return (self.layer(batch) - batch.sum()).pow(2).mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        def train_dataloader(self):
            return DataLoader(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)), batch_size=4)
    return Net()

def raised(work):
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported what takes long, but neither of the packages, and whose forks run programs."""
    with subprocess.Popen(
        [sys.executable, "-c", _FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        yield run
        run.stdin.close()


@pytest.fixture
def run(forks: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Run a program in a fork, and return what it has printed."""

    def run(program: str, *arguments: str, variable: str | None = None) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "program.py"
        path.write_text(_SETUP + program)
        environment = {**os.environ, **({} if variable is None else {"HIERCOMM_LIGHTNING": variable})}
        forks.stdin.write(json.dumps([[str(path), *arguments], environment, str(tmp_path)]) + "\n")
        forks.stdin.flush()
        code = int(forks.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, *((tmp_path / n).read_text() for n in ("stdout", "stderr")))

    return run


@pytest.fixture
def said(run: Run) -> Callable[..., object]:
    """Run a program, and return the JSON of its last line."""

    def said(*arguments: str, **named: str | None) -> object:
        ended = run(*arguments, **named)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
        return json.loads(ended.stdout.splitlines()[-1])

    return said


WHICH = """
for name in sys.argv[1:]:
    importlib.import_module(name)
modules, environment = set(sys.modules), dict(os.environ)
import lightning_hiercomm
base = next(base for base in lightning_hiercomm.HierarchicalStrategy.__mro__ if base.__name__ == "DDPStrategy")
trees = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")
registered = [
    name for name, registry in (("lightning.pytorch", "StrategyRegistry"), ("pytorch_lightning", "StrategyRegistry"),
        ("lightning.fabric", "STRATEGY_REGISTRY"), ("lightning_fabric", "STRATEGY_REGISTRY"))
    if name in sys.modules and "hierarchical" in getattr(importlib.import_module(name + ".strategies"), registry)
]
print(json.dumps([base.__module__.split(".")[0], registered, sorted({*trees} & set(sys.modules) - modules),
    environment == dict(os.environ)]))
"""
LIGHTNING = ["lightning", ["lightning.pytorch", "lightning.fabric"]]
OTHER = ["pytorch_lightning", ["pytorch_lightning", "lightning_fabric"]]


@pytest.mark.parametrize(
    ("imported", "variable", "expected", "imports"),
    [
        ([], None, LIGHTNING, ["lightning.fabric", "lightning.pytorch"]),
        (["lightning.pytorch"], None, LIGHTNING, []),
        (["pytorch_lightning"], None, OTHER, []),
        (["pytorch_lightning", "lightning"], None, LIGHTNING, []),
        ([], "pytorch_lightning", OTHER, ["lightning_fabric", "pytorch_lightning"]),
        (["lightning", "pytorch_lightning"], "pytorch_lightning", OTHER, []),
    ],
)
def test_import_decides_for_one_package_and_registers_names_there(said, imported, variable, expected, imports):
    assert said(WHICH, *imported, variable=variable) == [*expected, imports, True]


def test_an_unknown_package_is_refused(run):
    ended = run(WHICH, variable="litning")
    assert "ImportError: HIERCOMM_LIGHTNING='litning' must be one of lightning, pytorch_lightning" in ended.stderr


MIXED = """
import lightning.pytorch, lightning.fabric, pytorch_lightning, lightning_fabric
import lightning_hiercomm as hiercomm
first, second = pytorch_lightning, lightning.pytorch
if sys.argv[1] == "lightning":
    first, second = second, first
class Own(second.Callback):
    pass
trainer = first.Trainer(**QUIET, devices=1, strategy=hiercomm.HierarchicalStrategy(), callbacks=[Own()], max_steps=1)
watched = second.Trainer(**QUIET, devices=1, callbacks=[hiercomm.CommunicationMonitor()], max_steps=1)
fabric = lightning_fabric if first is lightning.pytorch else lightning.fabric
print(json.dumps([
    raised(lambda: second.Trainer(**QUIET, strategy=hiercomm.HierarchicalStrategy())),
    raised(lambda: fabric.Fabric(accelerator="cpu", strategy=hiercomm.HierarchicalFabricStrategy())),
    raised(lambda: trainer.fit(net(first))),
    raised(lambda: watched.fit(net(second))),
    raised(lambda: trainer.fit(net(second))),
]))
"""


@pytest.mark.parametrize("used", ["lightning", "pytorch_lightning"])
def test_objects_of_both_packages_end_in_one_error_with_the_remedy(said, used):
    one, other = ("lightning.pytorch", "pytorch_lightning")[:: 1 if used == "lightning" else -1]
    note = (
        f"lightning_hiercomm uses `{one}` in this process. To use `{other}`, set"
        f" HIERCOMM_LIGHTNING={other.removesuffix('.pytorch')}, or import only `{other}`, and before lightning_hiercomm"
    )
    strategy, fabric, callback, trainer, module = said(MIXED, used, variable=used)
    assert f"HierarchicalStrategy(AllReduce())  # {note}" in strategy
    assert f"HierarchicalFabricStrategy(AllReduce())  # {note}" in fabric
    assert callback == f"TypeError: Own is of `{other}`, but {note}"
    assert trainer == f"TypeError: Trainer is of `{other}`, but {note}"
    assert module.startswith("TypeError: `model` must be a `LightningModule`")  # Lightning's, before it asks a strategy


FIT = """
def main(tree, epochs, saved, loaded=None):
    pl = importlib.import_module(tree)
    import lightning_hiercomm as hiercomm

    class Report(pl.Callback):
        def on_fit_end(self, trainer, pl_module):
            assert os.environ["HIERCOMM_LIGHTNING"] == tree.split(".")[0]  # what spawned ranks follow
            torch.save(pl_module.state_dict(), f"{saved}.{trainer.global_rank}.pt")

    strategy = hiercomm.HierarchicalStrategy(
        hiercomm.DASO(2, 1, warmup=hiercomm.Epochs(1), cooldown=0), ranks_per_node=1, start_method="fork",
        checkpoint_replicas=True,
    )
    save = pl.callbacks.ModelCheckpoint(dirpath=saved, filename="last", save_on_train_epoch_end=True)
    trainer = pl.Trainer(
        **QUIET, devices=2, strategy=strategy, max_epochs=int(epochs), callbacks=[hiercomm.CommunicationMonitor(), save,
        Report()],
    )
    trainer.fit(net(pl), ckpt_path=loaded)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def test_a_pytorch_lightning_program_trains_and_resumes_to_the_bits_of_lightning(run, tmp_path):
    """A checkpoint of one package is resumed by the other, on every rank to the bit."""

    def fit(*arguments):
        ended = run(FIT, *arguments)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
        assert "Communication of" in ended.stdout

    fit("lightning.pytorch", "4", "whole")
    fit("pytorch_lightning", "2", "half")
    fit("lightning.pytorch", "4", "resumed", "half/last.ckpt")
    for rank in range(2):
        whole, resumed = (torch.load(tmp_path / f"{name}.{rank}.pt") for name in ("whole", "resumed"))
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


CLI = """
import pytorch_lightning.cli
from pytorch_lightning.demos.boring_classes import BoringModel
import lightning_hiercomm

Path("config.yaml").write_text('''
trainer:
  accelerator: cpu
  logger: false
  strategy:
    class_path: lightning_hiercomm.HierarchicalStrategy
    init_args:
      ranks_per_node: 1
      scheme: {class_path: lightning_hiercomm.PeriodicAveraging, init_args: {sync_every: 7}}
''')

def built(path):
    return pytorch_lightning.cli.LightningCLI(
        BoringModel, run=False, args=["--config", path], save_config_callback=None
    )

cli = built("config.yaml")
Path("saved.yaml").write_text(cli.parser.dump(cli.config))
strategy = built("saved.yaml").trainer.strategy
by_name = pytorch_lightning.Trainer(**QUIET, strategy="hierarchical_daso").strategy
print(json.dumps([type(strategy) is type(by_name) is lightning_hiercomm.HierarchicalStrategy, repr(strategy)]))
"""


def test_lightning_cli_of_pytorch_lightning_makes_the_strategy(said):
    assert said(CLI) == [True, "HierarchicalStrategy(PeriodicAveraging(sync_every=7), ranks_per_node=1)"]

"""The papers' full-size configurations: every one through its program."""

from __future__ import annotations

import importlib
import math
import re
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.cli import ReduceLROnPlateau
from pairwise import on_push
from problems import one_trainer
from torch.optim.lr_scheduler import CosineAnnealingLR, PolynomialLR
from torchvision.models import WeightsEnum

PAPERS = Path(__file__).resolve().parents[2] / "examples" / "papers"
STRATEGY = "--trainer.strategy.init_args"
SMALL = {
    "architecture": ["--model.architecture=shufflenet_v2_x0_5"],  # what each asks for is made in another test
    "net.layer4.2": ["--model.architecture=resnet50"],  # whose blocks are the fragments
    "vit_b_16": ["--model.weights=null", "--data.size=32"],
    "imagenet": ["--data.size=32"],
    "HeterogeneousBatches": [  # BatchNorm needs two of such small pictures on each rank, whatever would be measured
        f"{STRATEGY}.batches.init_args.global_batch_size=4",
        f"{STRATEGY}.batches.init_args.speeds=[1,1]",
    ],
}
DRAWN = """
import runpy, torchvision.datasets
for name, shape in (("CIFAR10", (3, 32, 32)), ("CIFAR100", (3, 32, 32)), ("MNIST", (1, 28, 28))):
    setattr(torchvision.datasets, name, lambda *_, transform, shape=shape, **__: torchvision.datasets.FakeData(
        8, shape, 8, transform))
runpy.run_path({program!r}, run_name="__main__")
"""
"""Random pictures, instead of a download."""


def said(config, what):
    return re.search(what, (PAPERS / config).read_text())[1]


RUNS = [(path.name, said(path.name, r"dataset: (\w+)")) for path in sorted(PAPERS.glob("*.yaml"))]
RUNS.append(("001-cifar10.yaml", "mnist"))
ON_PUSH = [next(run for run in RUNS if run[1] == dataset) for dataset in ("cifar10", "imagenet")]


@pytest.mark.long("a program imports torchvision, and two ranks train a network of it")
@pytest.mark.parametrize("run", on_push(RUNS, *ON_PUSH), ids="-".join)
def test_two_nodes_take_two_steps_with_a_papers_configuration(folder, run):
    config, dataset = run
    text, script = (PAPERS / config).read_text(), folder.path / "drawn.py"
    script.write_text(DRAWN.format(program=str(PAPERS / "train.py")))
    pictures = folder.make_imagenet(training=4, validation=4) if dataset == "imagenet" else folder.path
    out = folder.run(
        *(script, "fit", "--config", PAPERS / config),
        *("--trainer.accelerator=cpu", "--trainer.precision=32-true", "--trainer.num_nodes=1", "--trainer.devices=2"),
        *(f"{STRATEGY}.ranks_per_node=1", f"{STRATEGY}.start_method=fork", "--trainer.fast_dev_run=2"),
        *(f"--data.root={pictures}", f"--data.dataset={dataset}", "--data.batch_size=2", "--data.num_workers=0"),
        *(option for word, options in SMALL.items() if word in text for option in options),
    )
    steps = 1 if "accumulate" in text else 2
    assert f"Communication of {steps} optimizer steps on 2 ranks, 2 nodes" in out
    assert "Accuracy of the averaged model" in out


def test_every_configuration_names_its_source_and_assumptions():
    for path in PAPERS.glob("*.yaml"):
        comment = " ".join(line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
        assert re.search(r"(Table|Fig\.) [\dIV]+", comment), path
        assert "Not given: " in comment or "The rest" in comment, path


@pytest.fixture
def train(monkeypatch):
    """The papers' program, as a module."""
    monkeypatch.syspath_prepend(PAPERS)
    with mock.patch.dict(sys.modules):  # other examples have modules of the same names
        return importlib.import_module("train")


@pytest.mark.nightly  # a push trains two of them
@pytest.mark.long("makes ten networks of torchvision, nearly all of them twice")
def test_models_have_the_requested_classes_and_fit_small_pictures(train, monkeypatch):
    # the weights would have to be downloaded
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", lambda *_, **__: None)
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *_, **__: {})
    small = [(name, 32, True) for name in ("resnet18", "resnet50", "densenet121")]
    others = [("resnet20", 32, False), ("resnet34", 64, False), ("vgg11", 32, False), ("vgg16_bn", 32, False)]
    others += [("alexnet", 224, False), ("shufflenet_v2_x1_0", 64, False), ("vit_b_16", 224, False)]
    for name, size, is_small in [*small, *others]:
        for weights in (None, "DEFAULT") if name != "resnet20" else (None,):
            seen = []
            with torch.device("meta"):
                net = train.make_net(name, 7, weights, is_small)
                for layer in net.modules():
                    if isinstance(layer, torch.nn.MaxPool2d | torch.nn.Identity):
                        layer.register_forward_hook(lambda *given, seen=seen: seen.append(given[-1].shape[-1]))
                assert net(torch.empty(2, 3, size, size)).shape == (2, 7), name
            assert not is_small or seen[0] == 32, name


@pytest.mark.parametrize(
    ("schedule", "after", "factor"),
    [
        (partial(CosineAnnealingLR, T_max=4), 0, lambda epoch: 0.5 * (1 + math.cos(math.pi * epoch / 4))),
        (partial(PolynomialLR, total_iters=2, power=2.0), 2, lambda epoch: (1 - max(0, epoch - 2) / 2) ** 2),
        (
            partial(
                ReduceLROnPlateau, monitor="epoch_loss", factor=0.5, patience=0, threshold=100.0, threshold_mode="abs"
            ),
            0,
            lambda epoch: 0.5 ** max(0, epoch - 1),  # no loss falls by 100
        ),
    ],
    ids=["cosine", "polynomial, when it has risen", "plateau"],
)
def test_learning_rates_scale_with_the_batch_and_follow_the_schedule(train, tmp_path, schedule, after, factor):
    pictures, rates = [(torch.randn(3, 32, 32), i % 10) for i in range(16)], []
    model = train.PaperClassifier(
        "shufflenet_v2_x0_5",
        optimizer=partial(torch.optim.SGD, lr=0.1),
        schedule=schedule,
        schedule_after=after,
        pictures_per_lr=2,
        warmup_epochs=2,
        batch_size=4,
    )
    notes = LambdaCallback(on_train_batch_start=lambda run, *_: rates.append(run.optimizers[0].param_groups[0]["lr"]))
    run = one_trainer(tmp_path, max_epochs=4, limit_val_batches=0, callbacks=[notes])
    run.fit(model, torch.utils.data.DataLoader(pictures, 4))
    peak = 0.1 * 4 / 2
    risen = [1 / 8 + 7 / 8 * min(1, step / 8) for step in range(16)]
    assert rates == pytest.approx([peak * risen[step] * factor(step // 4) for step in range(16)], rel=1e-5)

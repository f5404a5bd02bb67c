"""The ResNet example: on what it draws, and on folders of pictures as ImageNet's."""

from __future__ import annotations

import re

import pytest


def fit(folder, config, *arguments):
    return folder.run("resnet/main.py", "fit", "--config", folder.examples / "resnet" / config, *arguments)


@pytest.mark.nightly  # a push trains the same program on folders of pictures
@pytest.mark.long("four epochs of a residual network on four ranks, which have to learn")
def test_a_short_run_learns_coloured_digits(folder):
    out = fit(folder, "config.yaml", "--trainer.max_epochs=4")
    assert "on 4 ranks, 2 nodes" in out
    assert float(re.search(r"on held-out images: ([\d.]+)%", out)[1]) > 30  # 10 know nothing


def test_the_large_configurations_are_valid(folder):
    assert "wire_dtype: bfloat16" in fit(folder, "cifar10.yaml", "--data.root=/data", "--print_config")
    assert "architecture: resnet50" in fit(folder, "imagenet.yaml", "--data.root=/data", "--print_config")


@pytest.mark.long("three epochs, one for each of DASO's phases, of a network of torchvision")
def test_the_imagenet_configuration_trains_on_folders_of_pictures(folder):
    pictures = folder.make_imagenet(training=8, validation=4)
    out = fit(
        folder,
        "imagenet.yaml",
        *("--trainer.accelerator=cpu", "--trainer.precision=32-true", "--trainer.num_nodes=1", "--trainer.devices=2"),
        *("--trainer.strategy.init_args.ranks_per_node=1", "--trainer.strategy.init_args.start_method=fork"),
        *("--trainer.max_epochs=3", "--trainer.strategy.init_args.scheme.init_args.warmup.epochs=1"),
        *("--trainer.strategy.init_args.scheme.init_args.cooldown.epochs=1", "--model.architecture=shufflenet_v2_x0_5"),
        *("--model.num_classes=2", f"--data.root={pictures}", "--data.size=32", "--data.batch_size=4"),
        "--data.num_workers=0",
    )
    assert "what was sent" in out  # the monitor's summary
    assert "on held-out images" in out

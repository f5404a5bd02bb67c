"""The segmentation example, run the way its docstring says."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

PHASES = [f"--trainer.strategy.init_args.scheme.init_args.{phase}.epochs=1" for phase in ("warmup", "cooldown")]


def fit(folder, config, *args):
    """Runs the program; returns what it printed."""
    program = folder.examples / "segmentation"
    return folder.run("segmentation/main.py", "fit", "--config", program / config, *args)


def mean_iou(out):
    return float(re.search(r"Mean IoU of the averaged model: ([\d.]+)%", out)[1])


@pytest.mark.nightly
@pytest.mark.long("three epochs on four ranks, one for each phase of DASO, which have to learn")
def test_short_run_learns_to_segment_and_goes_through_all_phases(folder):
    out = fit(folder, "config.yaml", "--trainer.max_epochs=3", *PHASES)
    assert re.findall(r"DASO: (\S+) from epoch (\d)", out) == [("warm-up", "0"), ("cycling", "1"), ("cool-down", "2")]
    assert mean_iou(out) > 50  # knowing sky and road alone, the two largest of five classes, gives less than 40


@pytest.mark.nightly  # a push trains the larger ImageNet program through the same phases
@pytest.mark.long("three epochs on four ranks, one for each phase of DASO, which have to learn")
def test_the_same_program_trains_on_a_cityscapes_folder(folder):
    make_cityscapes(folder.path / "cityscapes", {"train": 32, "val": 4})
    out = fit(
        folder,
        "cityscapes.yaml",
        *("--trainer.accelerator=cpu", "--trainer.sync_batchnorm=false", "--trainer.num_nodes=1"),
        *("--trainer.devices=4", "--trainer.strategy.init_args.ranks_per_node=2"),
        *("--trainer.strategy.init_args.start_method=fork", "--trainer.max_epochs=3"),
        *(*PHASES, "--model.width=4", "--model.levels=2"),
        *("--data.init_args.batch_size=1", "--data.init_args.crop=[32, 64]", "--data.init_args.num_workers=0"),
    )
    assert mean_iou(out) > 50  # of two classes, by their colours


def make_cityscapes(root, lengths):
    """Pictures in Cityscapes' folders and with its names: a grey road (label id 7) below a blue sky (23)."""
    for split, length in lengths.items():
        for number in range(length):
            name = f"aachen_{number:06d}_000019"
            labels = np.full((64, 128), 23, dtype=np.uint8)
            labels[24 + number % 16 :] = 7
            labels[-4:] = 1  # the car itself, which does not count
            pixels = np.where((labels == 23)[..., None], [90, 130, 220], [110, 110, 110]).astype(np.uint8)
            for values, kind, end in ((pixels, "leftImg8bit", ""), (labels, "gtFine", "_labelIds")):
                path = root / kind / split / "aachen" / f"{name}_{kind}{end}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(values).save(path)

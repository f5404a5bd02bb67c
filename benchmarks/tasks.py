"""All tasks of simulations: those of the package, and two that are the benchmarks' and the examples' own.

What they can tell apart: one replica (so no method at all; AllReduce of several is the same), the same examples seen in
larger batches, the learning rate growing with their square root. Accuracy in percent, the mean and the standard
deviation of five seeds; the last column is what 16 times the batch costs, in standard deviations (the larger one).

================  ======  =====  ==========  ===========  ===========  ======
task              epochs  batch  x1          x4           x16          apart
================  ======  =====  ==========  ===========  ===========  ======
mnist1d           16      16     94.0 ± 0.5  92.2 ± 1.0   77.8 ± 4.3   4
gru               16      16     85.7 ± 0.8  83.4 ± 1.5   69.9 ± 2.0   8
lstm              16      16     83.9 ± 1.2  79.7 ± 0.7   63.3 ± 1.1   17
rnn               16      16     54.7 ± 4.5  53.6 ± 2.3   49.3 ± 1.3   1
gan               20      64     87.4 ± 2.0  53.0 ± 11.4  28.5 ± 9.3   6
characters_adamw  0.02    8      60.6 ± 0.4  59.7 ± 0.6   55.1 ± 0.4   14
segmentation      8       8      84.5 ± 1.1  66.9 ± 8.9   48.5 ± 2.2   16
================  ======  =====  ==========  ===========  ===========  ======

A plain recurrent network tells nothing apart here. The GAN and the segmentation do at their ends, but in between seeds
differ by ten points.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks import zoo
from benchmarks.simulate.tasks import Examples, Task, Turn
from benchmarks.workloads import WORKLOADS, character_windows, judged, loss_of

_SEGMENTATION = Path(__file__).resolve().parents[1] / "examples" / "segmentation"
_PICTURES = (512, 128)  # to train on, and held out; of 32 x 64 pixels


def adamw(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """With torch's defaults."""
    return torch.optim.AdamW(parameters, learning_rate)


def _character_examples() -> tuple[Examples, Examples]:
    held_out = WORKLOADS["characters_adamw"].held_out
    assert held_out is not None
    return character_windows(), held_out()


@cache
def _example() -> tuple[Any, Any]:
    """The modules of the segmentation example; by their names they could be any example's."""
    others = {name: sys.modules.pop(name) for name in ("data", "model") if name in sys.modules}
    sys.path.insert(0, str(_SEGMENTATION))
    try:
        return importlib.import_module("data"), importlib.import_module("model")
    except ImportError as error:
        raise ValueError("the task segmentation needs torchvision: pip install torchvision") from error
    finally:
        sys.path.remove(str(_SEGMENTATION))
        for name in ("data", "model"):
            sys.modules.pop(name, None)
        sys.modules.update(others)


@cache
def _streets() -> tuple[Examples, Examples]:
    data, _ = _example()
    drawn = data.DrawnStreets(0, sum(_PICTURES), 32)
    pictures, labels = map(torch.stack, zip(*(drawn[index] for index in range(len(drawn))), strict=True))
    count = _PICTURES[0]
    return (pictures[:count], labels[:count]), (pictures[count:], labels[count:])


def _unet(classes: int) -> nn.Module:
    _, model = _example()
    unet: nn.Module = model.UNet(classes, width=8, levels=3)
    return unet


@torch.no_grad()
def _judge_pixels(model: nn.Module, examples: Examples) -> tuple[float, float]:
    """The mean intersection over union, and the loss."""
    from torchmetrics.functional.classification import multiclass_jaccard_index

    pictures, labels = examples
    scores = model(pictures)
    return float(multiclass_jaccard_index(scores, labels, scores.shape[1])), float(cross_entropy(scores, labels))


TASKS = {
    **zoo.TASKS,
    "characters_adamw": Task(
        "characters_adamw",
        lambda _: WORKLOADS["characters_adamw"].build(),
        _character_examples,
        batch=8,
        learning_rate=2e-3,
        optimizer=adamw,
        turns=(Turn(loss_of),),
        judge=judged,
    ),
    "segmentation": Task("segmentation", _unet, _streets, batch=8, learning_rate=0.1, judge=_judge_pixels),
}
"""By name."""

"""A task of your own for `python -m lightning_hiercomm simulate --task own_task:task`."""

from functools import cache

import torch
from torch import nn

from lightning_hiercomm.planning.simulate.tasks import Task


@cache
def examples():
    inputs = torch.randn(5_000, 20, generator=torch.Generator().manual_seed(0))
    targets = (inputs[:, 0] * inputs[:, 1] > 0).long()
    return (inputs[1_000:], targets[1_000:]), (inputs[:1_000], targets[:1_000])  # training, held-out


def build(classes):
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, classes))


task = Task("sign", build, examples, batch=16, learning_rate=0.1)

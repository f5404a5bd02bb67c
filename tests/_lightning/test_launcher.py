"""What a rank does first."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
)
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from packaging.version import Version

from lightning_hiercomm._lightning.launcher import place_of, settle_as_fork


def test_a_forked_rank_starts_its_threads_before_backward(monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    settle_as_fork("spawn")
    assert asked == []
    settle_as_fork("fork")
    assert asked == [torch.get_num_threads()]


COMPILED_BEFORE_A_FORK = """
import os, torch
from lightning_hiercomm._lightning.launcher import settle_as_fork

torch.compile(torch.nn.Linear(3, 3), backend="aot_eager")(torch.randn(2, 3)).sum().backward()
if os.fork() == 0:
    try:
        settle_as_fork("fork")
    except RuntimeError as error:
        print(error, flush=True)
    else:
        print("it trains", flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.long("it compiles")
def test_a_fork_after_a_compilation_is_refused_with_a_remedy():
    """A process of its own, because the forks of this one could not train afterwards."""
    ran = subprocess.run([sys.executable, "-c", COMPILED_BEFORE_A_FORK], stdout=subprocess.PIPE, text=True, timeout=180)
    refusal = "a forked rank cannot compute gradients, because torch.compile or a GPU has done so"
    assert ran.stdout.startswith("it trains" if Version(torch.__version__) < Version("2.8") else refusal)


@pytest.mark.parametrize(
    ("kind", "by_launcher", "by_others"),
    [
        (TorchElasticEnvironment, True, True),
        (MPIEnvironment, True, True),
        (LightningEnvironment, True, False),
        (SLURMEnvironment, False, False),
        (LSFEnvironment, False, False),
        (KubeflowEnvironment, False, False),
    ],
)
def test_environments_with_a_launcher_per_node_may_share_a_host(kind, by_launcher, by_others):
    environment = object.__new__(kind)  # most ask for variables
    assert issubclass(kind, ClusterEnvironment)
    for starts_ranks, expected in ((True, by_launcher), (False, by_others)):
        place = place_of(environment, 1, 2, starts_ranks)
        assert (place.node, place.local_rank, place.nodes_share_hosts) == (1, 2, expected)
        assert place.environment == kind.__name__

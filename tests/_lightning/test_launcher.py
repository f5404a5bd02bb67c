"""How ranks are launched, what a rank does first, and where it is."""

from __future__ import annotations

import gc
import inspect
import os

import pytest
import torch
from forked import ForkedPython
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
)
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from packaging.version import Version

from lightning_hiercomm._lightning.launcher import (
    check_ranks_of_node,
    place_of,
    settle_as_fork,
)


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
def test_a_fork_after_a_compilation_is_refused_with_a_remedy(tmp_path):
    """A process of its own, because the forks of this one could not train afterwards."""
    said, _ = ForkedPython(["-c", COMPILED_BEFORE_A_FORK], os.environ, tmp_path / "said").communicate(timeout=180)
    refusal = "a forked rank cannot compute gradients, because torch.compile or a GPU has done so"
    assert ("it trains" if Version(torch.__version__) < Version("2.8") else refusal) in said


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


def test_lightnings_fork_launcher_has_the_members_we_override():
    assert "self._wrapping_function," in inspect.getsource(_MultiProcessingLauncher.launch)
    assert issubclass(SIGTERMException, SystemExit)  # which leaves a rank with exit code 0


def test_the_ranks_of_a_node_are_compared_with_devices(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    environment = TorchElasticEnvironment()
    assert "validate_settings" in vars(TorchElasticEnvironment)
    check_ranks_of_node(environment)
    environment.validate_settings(num_devices=2, num_nodes=7)
    with pytest.raises(ValueError, match=r"devices=1\), but 2 ranks were started on this node: give devices=2"):
        environment.validate_settings(num_devices=1, num_nodes=1)

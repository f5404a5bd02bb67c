"""Runs under Ray Train, on a local Ray of two nodes of two CPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ports import free_port

JOB = str(Path(__file__).resolve().parents[1] / "jobs" / "on_ray.py")
SECONDS = 280  # a loaded machine starts four workers in two minutes


def run(*commands: list[str], seconds: float = SECONDS) -> None:
    """Run Python commands at the same time; all processes that they start end with them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=seconds)
            assert process.returncode == 0, output[-5000:]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def needs_ray() -> None:
    pytest.importorskip("ray.train", reason="needs the extra `ray`")


@pytest.fixture(scope="module")
def runs(needs_ray, tmp_path_factory) -> Path:
    folder, port = tmp_path_factory.mktemp("ray"), str(free_port())
    launch = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    job = ["--master-port", port, JOB, str(folder), "torchrun"]
    run(*([*launch, "--node-rank", str(node), *job] for node in range(2)))
    run([JOB, str(folder), "ray", "killed"])
    return folder


@pytest.mark.slow
@pytest.mark.long("starts a Ray cluster, and trains three times")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["ray", "killed"])
def test_ray_trains_to_the_bits_of_torchrun(runs, name):
    """Also if a worker was killed in the second epoch: all restart from the checkpoint of the first one."""
    found, expected = (torch.load(runs / f"{each}.pt", weights_only=True) for each in (name, "torchrun"))
    assert found["nodes"] == expected["nodes"] == [[0, 1], [2, 3]]
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=0, atol=0)
    began = (runs / f"{name}.epochs").read_text().split()
    assert began == (["0", "1", "2"] if name == "ray" else ["0", "1", "1", "2"])


@pytest.mark.nightly
@pytest.mark.long("starts a Ray cluster, whose workers import torch")
@pytest.mark.timeout(600)
def test_other_workers_train_on_while_ray_restarts_one(tmp_path):
    run([JOB, str(tmp_path), "elastic"], seconds=560)
    found = {path.stem: json.loads(path.read_text()) for path in sorted(tmp_path.glob("?.?.json"))}
    assert [*found] == ["0.0", "1.0", "2.0", "3.0", "3.1"]  # no survivor was restarted
    killed, back = found["3.0"]["killed"], found["3.1"]["steps"][0]
    for name in ("0.0", "1.0", "2.0"):
        assert any(killed + 1 < at < back[0] for at, _ in found[name]["steps"])
    assert back[1] > found["3.0"]["steps"][-1][1]  # it begins with the others' state, not at a checkpoint
    ended = [found[name] for name in ("0.0", "1.0", "2.0", "3.1")]
    assert [life["step"] for life in ended] == [120] * 4
    assert len({life["digest"] for life in ended}) == 1


@pytest.mark.parametrize(
    ("is_elastic", "size", "is_node", "error"),
    [
        (False, 1, "", "each would train alone: give the strategy elastic=, or use TorchConfig"),
        (True, 1, "", r"needs TorchTrainer\(torch_config=ElasticTorchConfig"),
        (True, 4, "", r"needs TorchTrainer\(torch_config=ElasticTorchConfig"),
        (False, 4, "", ""),
        (True, 1, "1", ""),
    ],
    ids=["separate", "torchft", "torch", "static", "elastic"],
)
def test_elastic_and_the_torch_config_of_ray_fit(monkeypatch, is_elastic, size, is_node, error):
    from lightning_hiercomm.trainer.ray import check_torch_config

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: size)
    monkeypatch.setenv("HIERCOMM_RAY_WORKER_IS_NODE", is_node)
    with pytest.raises(ValueError, match=error) if error else nullcontext():
        check_torch_config(is_elastic, 4)


def test_elastic_torch_config_wants_an_elastic():
    from lightning_hiercomm.trainer.ray_elastic import ElasticTorchConfig

    with pytest.raises(TypeError, match="must be the Elastic that the strategy gets"):
        ElasticTorchConfig("10.0.0.1:29510")


def test_worker_succeeds_that_starts_after_the_run_has_finished():
    from lightning_hiercomm import Elastic
    from lightning_hiercomm.elastic.quorum import RunFinished, StaleReplica
    from lightning_hiercomm.trainer.ray_elastic import ElasticTorchConfig

    context = ElasticTorchConfig(Elastic()).train_func_context
    with context():
        raise RunFinished
    with pytest.raises(StaleReplica), context():
        raise StaleReplica


def test_worker_succeeds_that_finds_no_node_if_another_has_finished(monkeypatch):
    from lightning_hiercomm import Elastic
    from lightning_hiercomm.elastic.quorum import NodeRefused
    from lightning_hiercomm.trainer import ray_elastic

    finished: list[bool] = []
    finish = SimpleNamespace(remote=lambda: finished.append(True))
    actor = SimpleNamespace(finish=finish, has_finished=SimpleNamespace(remote=lambda: bool(finished)))
    monkeypatch.setattr(ray_elastic, "_lighthouse", actor)
    monkeypatch.setattr(ray_elastic.ray, "get", lambda value: value)
    context = ray_elastic.ElasticTorchConfig(Elastic()).train_func_context
    with pytest.raises(NodeRefused), context():
        raise NodeRefused
    with context():
        pass
    with context():
        raise NodeRefused


def test_ray_has_the_private_names_that_elastic_nodes_use():
    from ray.train.v2._internal.execution.worker_group import WorkerGroup
    from ray.train.v2.torch.torchft_config import _TorchftBackend

    assert _TorchftBackend.has_replica_groups
    assert callable(_TorchftBackend._maybe_create_lighthouse_actor)  # noqa: SLF001 - our backend overrides it
    assert callable(WorkerGroup.replace_replica_group)

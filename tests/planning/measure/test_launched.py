"""`probe` and `doctor` on several ranks, as launchers start them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from forked import ForkedPython, stand_in_for_python
from ports import free_port

from lightning_hiercomm.planning.measure.profile import Profile
from lightning_hiercomm.planning.predict.cost import predict
from lightning_hiercomm.schemes import DASO

SECONDS = 60

MODULE = """
import torch
import lightning.pytorch as pl
from lightning_hiercomm import HierarchicalStrategy
from torch.utils.data import DataLoader


class Model(pl.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.layer = torch.nn.Linear(width, width)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def train_dataloader(self):
        return DataLoader(torch.randn(64, self.layer.in_features), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
"""


def run_ranks(folder: Path, environments: list[dict[str, str]], *arguments: str) -> list[str]:
    """Start one process for each environment; returns what they said."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        ForkedPython(["-m", "lightning_hiercomm", *arguments], {**common, **own}, folder / f"rank-{rank}", folder)
        for rank, own in enumerate(environments)
    ]
    said = []
    for process in processes:
        text, _ = process.communicate(timeout=SECONDS)
        said.append(text)
        assert process.returncode == 0, said
    return said


def torchrun(nodes: int, ranks: int) -> list[dict[str, str]]:
    port = str(free_port())
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(nodes * ranks),
            "LOCAL_RANK": str(rank % ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": str(rank // ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "none",
        }
        for rank in range(nodes * ranks)
    ]


def slurm(nodes: int, ranks: int) -> list[dict[str, str]]:
    job = {
        "SLURM_JOB_ID": str(free_port() - 15_000),  # Lightning makes it the port
        "SLURM_JOB_NAME": "planning",
        "SLURM_NTASKS": str(nodes * ranks),
        "SLURM_NTASKS_PER_NODE": str(ranks),
        "SLURM_NNODES": str(nodes),
        "SLURM_NODELIST": "127.0.0.1",
    }
    return [
        {**job, "SLURM_PROCID": str(r), "SLURM_NODEID": str(r // ranks), "SLURM_LOCALID": str(r % ranks)}
        for r in range(nodes * ranks)
    ]


@pytest.mark.long("four ranks time every move between nodes and inside them")
def test_probe_under_torchrun_writes_a_usable_profile(tmp_path):
    (tmp_path / "model_of_a_person.py").write_text(MODULE)
    module = ("--module", "model_of_a_person:Model", "--module-args", '{"width": 32}')
    environments = [{**own, "PYTHONPATH": str(tmp_path)} for own in torchrun(2, 2)]
    first, *others = run_ranks(tmp_path, environments, "probe", *module, "--seconds", "0.02", "--out", "cluster.json")
    profile = Profile.read(tmp_path / "cluster.json")
    assert (profile.cluster.nodes, profile.cluster.ranks_per_node) == (2, 2)
    assert profile.workload.parameters == 32 * 32 + 32
    assert len(profile.step_seconds) == 4
    assert set(profile.cluster.inter.curves) == {"all_reduce", "reduce_scatter", "all_gather", "exchange"}
    assert set(profile.cluster.intra.curves) == {"all_reduce", "reduce_scatter", "all_gather", "broadcast"}
    assert predict(DASO(), profile.cluster, profile.workload).seconds > 0
    assert "between nodes, all-reduce" in first
    assert "averaging gradients: " in first
    assert "wrote cluster.json" in first
    assert not any("wrote" in said for said in others)


@pytest.mark.long("a probe trains for some seconds")
def test_probe_divides_ranks_into_nodes(tmp_path):
    arguments = ("probe", "--ranks-per-node", "1", "--params", "1e4", "--seconds", "0.02")
    run_ranks(tmp_path, torchrun(1, 2), *arguments)
    values = json.loads((tmp_path / "profile.json").read_text())
    assert values["about"]["nodes"] == [[0], [1]]


def test_doctor_under_slurm_finds_nodes_and_ports(tmp_path):
    first, *others = run_ranks(tmp_path, slurm(2, 2), "doctor")
    assert "4 ranks connected over gloo by SLURMEnvironment" in first
    assert "ranks 0-1; node 1" in first
    assert "several nodes are one machine" in first
    assert "every rank reaches an ephemeral port" in first
    assert others == [""] * 3


@pytest.mark.slow
def test_doctor_under_mpiexec_finds_one_node(mpiexec, tmp_path):
    command, environment = mpiexec("openmpi", 2)
    done = subprocess.run(
        [*command, stand_in_for_python(), "-m", "lightning_hiercomm", "doctor"],
        env={**environment, "GLOO_SOCKET_IFNAME": "lo"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks connected over gloo by MPIEnvironment" in done.stdout
    assert "all ranks are one node" in done.stdout

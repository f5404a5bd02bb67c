"""The commands of docs/howto/start_a_run.md and the files of examples/clusters, as they stand there.

Launchers that are not installed here are played: ``srun``, ``jsrun``, and what operators put into the environment.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from forked import ForkedPython, stand_in_for_python
from launches import slurm
from ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = dict(
    re.findall(
        r"^## (\w+)\n(.*?)(?=^## |\Z)", (ROOT / "docs/howto/start_a_run.md").read_text(), re.DOTALL | re.MULTILINE
    )
)
CLUSTERS = ROOT / "examples" / "clusters"
SHORT = "--trainer.max_epochs=1 --trainer.limit_train_batches=4"

pytestmark = pytest.mark.slow


def command(section: str, beginning: str) -> str:
    """The command that begins so, without installing anything."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", SECTIONS[section], re.DOTALL))
    lines = blocks.replace("\\\n", " ").splitlines()
    (found,) = (line for line in lines if line.startswith(beginning) and "pip install" not in line)
    return found


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like a checkout, to which runs write their logs."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def make_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run(folder: Path, *commands: str, **environment: str) -> str:
    """Run shell commands at the same time; what they printed."""
    allowed = {  # what a person gives as options where he is root, or has few cores
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    processes = [
        subprocess.Popen(
            ["bash", "-c", text],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **allowed, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for text in commands
    ]
    output = "".join(process.communicate(timeout=200)[0] for process in processes)
    assert not any(process.returncode for process in processes), output
    return output


def run_with_torchrun(checkout: Path, *commands: str, **environment: str) -> str:
    """Run shell commands that start torchrun, which forks here."""
    torchrun = (checkout / ".venv").readlink() / "bin" / "torchrun"
    (checkout / ".venv").unlink()
    make_program(checkout / ".venv/bin/torchrun", f'exec {stand_in_for_python()} {shlex.quote(str(torchrun))} "$@"')
    return run(checkout, *commands, PYTHON_EXEC=stand_in_for_python(), **environment)


def run_tasks(checkout, arguments, environments):
    """Return what tasks of a launcher print, one for each environment."""
    tasks = [
        ForkedPython(
            [*arguments, *SHORT.split()],
            {**os.environ, "OMP_NUM_THREADS": "1", **environment},
            checkout / f"task-{task}",
            checkout,
        )
        for task, environment in enumerate(environments)
    ]
    output = "".join(process.communicate(timeout=200)[0] for process in tasks)
    assert not any(process.returncode for process in tasks), output
    return output


@pytest.mark.long("two torchruns, and four ranks that train")
def test_torchrun(checkout):
    first = f"{command('torchrun', '.venv/bin/torchrun')} {SHORT}"
    second = first.replace("--node-rank 0", "--node-rank 1")
    assert first != second
    assert "on 4 ranks" in run_with_torchrun(checkout, first, second)


def launched(checkout: Path, launcher: str, script: str, **environment: str) -> tuple[list[str], list[str]]:
    """What a script gives to the launcher: options, and the arguments of Python."""
    make_program(checkout / launcher, 'printf "%s\\n" "$@" > command')
    run(checkout, f"bash {CLUSTERS / script}", **environment, PATH=f"{checkout}:{os.environ['PATH']}")
    words = (checkout / "command").read_text().splitlines()
    python = words.index(".venv/bin/python")
    return words[:python], words[python + 1 :]


@pytest.mark.nightly  # a push tests its variables in test_launching.py
@pytest.mark.long("eight ranks, as many as the script asks for, read the configuration and train")
def test_slurm(checkout):
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", (CLUSTERS / "digits.sbatch").read_text(), re.MULTILINE))
    places = slurm(int(options["nodes"]), int(options["ntasks-per-node"]))
    _, arguments = launched(checkout, "srun", "digits.sbatch", **places[0])
    assert "on 8 ranks" in run_tasks(checkout, arguments, places)


@pytest.mark.nightly  # a push tests LSF's and SLURM's variables in test_launching.py
@pytest.mark.long("four ranks that train")
def test_lsf(checkout):
    words, arguments = launched(checkout, "jsrun", "digits.lsf")
    options = dict(zip(words[::2], words[1::2], strict=True))
    hosts, ranks = int(options["--nrs"]), int(options["--tasks_per_rs"])
    assert options["--rs_per_host"] == "1"
    assert re.search(rf"^#BSUB -nnodes {hosts}$", (CLUSTERS / "digits.lsf").read_text(), re.MULTILINE)
    (checkout / "hosts").write_text("launch\n" + f"{socket.gethostname()}\n" * hosts * ranks)
    job = {"LSB_JOBID": "7", "LSB_DJOB_RANKFILE": str(checkout / "hosts"), "MASTER_PORT": str(free_port())}
    job["JSM_NAMESPACE_SIZE"] = str(hosts * ranks)
    places = [
        {**job, "JSM_NAMESPACE_RANK": str(rank), "JSM_NAMESPACE_LOCAL_RANK": str(rank % ranks)}
        for rank in range(hosts * ranks)
    ]
    assert "on 4 ranks" in run_tasks(checkout, arguments, places)


@pytest.mark.nightly
@pytest.mark.long("two torchruns, and three ranks that train")
def test_slurm_heterogeneous_job(checkout):
    make_program(checkout / "scontrol", '[ "$1 $2" = "show hostnames" ] && echo "$3"')
    make_program(
        checkout / "srun",
        """
        node=0 command=() status=0
        start() { SLURM_NODEID=$node "${command[@]}" & node=$((node + 1)); command=(); }
        for word in "$@"; do
            if [ "$word" = : ]; then start; elif [ "${word#--}" = "$word" ] || [ ${#command[@]} -gt 0 ]; then
                command+=("$word"); fi
        done
        start
        for job in $(jobs -p); do wait $job || status=1; done
        exit $status""",
    )
    script = (CLUSTERS / "heterogeneous.sbatch").read_text()
    (checkout / "script").write_text(script.replace("ranks_per_node=null", f"ranks_per_node=null {SHORT}"))
    job = {
        "SLURM_JOB_ID": str(free_port() - 15_000),
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "127.0.0.1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "localhost",
    }
    path = f"{checkout}:{os.environ['PATH']}"
    assert "on 3 ranks" in run_with_torchrun(checkout, "bash script", **job, PATH=path)


@pytest.mark.nightly
def test_skypilot(checkout):
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    nodes = task["num_nodes"]
    command = task["run"].replace("29500", str(free_port())).rstrip() + f" {SHORT}"
    every = f"SKYPILOT_NUM_NODES={nodes} SKYPILOT_NODE_IPS=$'127.0.0.1\\n127.0.0.1'"
    commands = [f"export SKYPILOT_NODE_RANK={node} {every}\n{command}" for node in range(nodes)]
    assert "on 4 ranks" in run_with_torchrun(checkout, *commands)


@pytest.mark.nightly
def test_kubeflow(checkout):
    job = yaml.safe_load((CLUSTERS / "kubeflow.yaml").read_text())["spec"]
    replicas = [job["pytorchReplicaSpecs"][kind] for kind in ("Master", "Worker")]
    pods = [replica["template"] for replica in replicas for _ in range(replica["replicas"])]
    ranks = int(job["nprocPerNode"])
    every = f"PET_NNODES={len(pods)} PET_NPROC_PER_NODE={ranks} WORLD_SIZE={ranks * len(pods)}"
    every += f" PET_MASTER_ADDR=127.0.0.1 PET_MASTER_PORT={free_port()}"
    commands = []
    for rank, pod in enumerate(pods):
        (container,) = pod["spec"]["containers"]
        exports = f"export {every} PET_NODE_RANK={rank} RANK={rank}"
        commands.append(f"{exports}\n.venv/bin/{' '.join(container['command'])} {SHORT}")
    assert "on 4 ranks" in run_with_torchrun(checkout, *commands)


@pytest.mark.nightly
def test_mpiexec_trains_with_daso(checkout):
    scheme = "--trainer.strategy.init_args.scheme.init_args"
    cycling = f"--config examples/digits/daso.yaml {scheme}.warmup.epochs=0 {scheme}.cooldown.epochs=0"
    assert "on 4 ranks" in run(checkout, f"{command('mpiexec', '.venv/bin/mpiexec')} {cycling} {SHORT}")

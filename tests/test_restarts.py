"""`torchrun --max-restarts`: a run that loses ranks again and again arrives where an undisturbed one does."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forked import ForkedPython
from lightning.fabric.plugins.environments.lightning import find_free_network_port

ROOT = Path(__file__).resolve().parents[1]
DIGITS = ROOT / "examples" / "digits"
SECONDS = 240

pytestmark = [pytest.mark.slow, pytest.mark.alone]

Train = Callable[..., list[ForkedPython]]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Train]:
    """``train(folder, *arguments, nodes="2")``: the digits on so many agents; ends what is left of them afterwards."""
    started: list[ForkedPython] = []

    def start(folder: str, *arguments: str, nodes: str = "2", agents: int = 2) -> list[ForkedPython]:
        where = tmp_path / folder
        where.mkdir()
        rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{find_free_network_port()}")
        # a node that is lost is missed after a second, and nobody waits long for it to come back
        impatient = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2"
        fork = ("--run-path", "--start-method", "fork", "--signals-to-handle", "SIGINT", "--local-addr", "127.0.0.1")
        mine = [
            ForkedPython(
                [
                    *("-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "2", *rendezvous, *fork),
                    *("--rdzv-conf", impatient, "--max-restarts", "9", "--monitor-interval", "0.1"),
                    *(ROOT / "tests/jobs/digits.py", "fit", "--config", DIGITS / "config.yaml", *arguments),
                    *("--trainer.devices=2", "--trainer.strategy.init_args.ranks_per_node=null"),
                    *("--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.max_epochs=6"),
                    *("--trainer.callbacks+=kills.Kills", f"--trainer.callbacks.folder={where}"),
                ],
                os.environ,
                where / f"output-{agent}",
                where,
            )
            for agent in range(agents)
        ]
        started.extend(mine)
        return mine

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ends_well(processes: list[ForkedPython], folder: Path) -> float:
    """The accuracy of a run that ends."""
    output = "\n".join(process.communicate(timeout=SECONDS)[0] for process in processes)
    assert [process.returncode for process in processes] == [0] * len(processes), output
    (accuracy,) = re.findall(r"Test accuracy of the agreed model: ([\d.]+)%", output)
    print(f"{folder.name}: {accuracy} %, started from {starts(folder)}")
    return float(accuracy)


def starts(folder: Path) -> list[tuple[int, int]]:
    """Steps from which a run started and resumed, and with how many ranks."""
    return [tuple(map(int, line.split())) for line in (folder / "starts").read_text().splitlines()]


def test_five_kills_in_one_run_change_no_bit(train, tmp_path):
    restarts = (f"--config={DIGITS / 'restarts.yaml'}", "--ckpt_path=last", "--trainer.num_nodes=2")
    undisturbed = ends_well(train("undisturbed", *restarts, "--trainer.callbacks.times=0"), tmp_path / "undisturbed")
    disturbed = ends_well(train("disturbed", *restarts, "--trainer.callbacks.seed=5"), tmp_path / "disturbed")
    assert len([*(tmp_path / "disturbed").glob("kill-*")]) == 5
    steps = [step for step, _ in starts(tmp_path / "disturbed")]
    assert len(steps) == 6
    assert steps == sorted(steps)
    assert steps[-1] > 0
    assert undisturbed == disturbed > 90
    one, other = (
        torch.load(tmp_path / run / "end.ckpt", weights_only=True)["state_dict"] for run in ("undisturbed", "disturbed")
    )
    for name, expected in one.items():
        assert torch.equal(other[name], expected), name

"""`torchrun --max-restarts`: a run that loses ranks again and again arrives where an undisturbed one does."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from forked import forking_workers
from launches import Job, Mpiexec
from ports import free_port

ROOT = Path(__file__).resolve().parents[1]
DIGITS, JOBS = ROOT / "examples" / "digits", str(ROOT / "tests" / "jobs")
SECONDS = 400  # until a run that should have ended fails the test
STEPS_AN_EPOCH = 16  # on two nodes of two ranks; on two of one, no more are taken

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Train = Callable[..., Job]


@pytest.fixture
def train(tmp_path: Path, mpiexec: Mpiexec) -> Iterator[Train]:
    """``train(folder, *arguments)``: the digits on two nodes of one rank; ends what is left of it."""
    with ExitStack() as jobs:

        def start(folder: str, *arguments: str) -> Job:
            where, port = tmp_path / folder, free_port()
            where.mkdir()
            job = jobs.enter_context(closing(Job(where, mpiexec)))
            for _ in range(2):
                job.python(
                    *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
                    *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
                    *("--local-addr", "127.0.0.1", "--max-restarts", "9", "--monitor-interval", "0.1"),
                    *forking_workers(),
                    *(str(DIGITS / "main.py"), "fit", "--config", str(DIGITS / "config.yaml")),
                    *("--config", str(DIGITS / "restarts.yaml"), "--ckpt_path=last"),
                    *("--trainer.devices=1", "--trainer.num_nodes=2", "--trainer.logger=false"),
                    *("--trainer.strategy.init_args.ranks_per_node=null", "--trainer.enable_progress_bar=false"),
                    *("--trainer.callbacks+=kills.Kills", f"--trainer.callbacks.folder={where}", *arguments),
                    environment={"PYTHONPATH": os.pathsep.join([str(DIGITS), JOBS, os.environ["PYTHONPATH"]])},
                )
                _wait_for(lambda: _listens(port))  # the first one keeps the store
            return job

        yield start


def _listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def _wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def accuracy(job: Job) -> float:
    """What a run reaches, once it has ended."""
    codes, output = job.end(SECONDS)
    assert codes == [0, 0], output
    (reached,) = re.findall(r"Test accuracy of the averaged model: ([\d.]+)%", output)
    return float(reached)


def written(folder: Path, name: str) -> list[dict[str, int]]:
    """What the ``Kills`` callback wrote of starts, or of kills, in their order."""
    return [json.loads((folder / f"{name}-{i}").read_text()) for i in range(len([*folder.glob(f"{name}-*")]))]


@pytest.mark.long("two runs of several epochs; one restarts after every kill")
def test_kills_in_one_run_change_no_bit(train, tmp_path):
    times, epochs = 2, 3
    short = f"--trainer.max_epochs={epochs}", f"--trainer.limit_train_batches={STEPS_AN_EPOCH}"
    began = time.monotonic()
    both = [
        train(folder, *short, f"--trainer.callbacks.times={kills}")
        for folder, kills in (("undisturbed", 0), ("disturbed", times))
    ]
    undisturbed, disturbed = (accuracy(job) for job in both)
    starts, kills = (written(tmp_path / "disturbed", name) for name in ("start", "kill"))
    print(f"{time.monotonic() - began:.0f} s; kills {kills}; starts {starts}; accuracy {disturbed} and {undisturbed}")
    assert len(kills) == times
    assert any(kill["saving"] for kill in kills)
    # the newest complete checkpoint: that of the last epoch's end, except one that was being written
    complete = [kill["step"] // STEPS_AN_EPOCH - kill["saving"] for kill in kills]
    assert [start["step"] for start in starts] == [0, *(epochs * STEPS_AN_EPOCH for epochs in complete)]
    assert undisturbed == disturbed > 60
    one, other = (
        torch.load(tmp_path / run / "end.ckpt", weights_only=True)["state_dict"] for run in ("undisturbed", "disturbed")
    )
    torch.testing.assert_close(other, one, rtol=0, atol=0)

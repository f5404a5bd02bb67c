"""Goodput of nodes that are stopped now and then: late nodes are merged, restarted, or waited for.

Nodes are processes of one rank on this machine; a step sleeps, so that two cores suffice. Each node is stopped and
continued (SIGSTOP, SIGCONT) at times that a seed determines, the same for all modes. Goodput is the number of batches
of all nodes per second, relative to an elastic run without stalls.

    python -m benchmarks.studies.late_nodes --nodes 4 --seeds 3
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

FEWEST, SECONDS, SYNC_EVERY = 2, 45.0, 40
GAP, STALL, DEAD_AFTER = 50.0, (1.0, 4.0), 1.0
MODES = ("no stalls", "merge", "restart", "blocking")


def node(folder: Path, mode: str, nodes: int, seed: int, lasting: float) -> None:
    """Train a node, and write its steps and its accuracy."""
    import lightning.pytorch as pl
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_hiercomm import Elastic, HierarchicalStrategy, PeriodicAveraging

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1500], order[1500:]
    name = os.environ["HIERCOMM_NODE"]

    class Digits(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(lasting)
            with (folder / f"{name}.steps").open("a") as file:
                file.write(f"{time.time():.3f}\n")
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    late: Any = "restart" if mode == "restart" else "merge"
    elastic = None if mode == "blocking" else Elastic(min_nodes=FEWEST, dead_after=DEAD_AFTER, late=late)
    trainer = pl.Trainer(
        max_steps=round(SECONDS / lasting),
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        num_nodes=nodes if mode == "blocking" else 1,
        strategy=HierarchicalStrategy(PeriodicAveraging(SYNC_EVERY), elastic=elastic),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    trainer.fit(model, DataLoader(TensorDataset(x[train], y[train]), batch_size=8, shuffle=True))
    accuracy = float((model.net(x[test]).argmax(1) == y[test]).float().mean())
    counts = trainer.strategy.communication()
    (folder / f"{name}.json").write_text(json.dumps({"accuracy": accuracy, "counts": counts}))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stalls(nodes: int, seed: int) -> list[tuple[float, int, int]]:
    """Return times in seconds, nodes and signals, in their order."""
    events = []
    for which in range(nodes):
        draw, at = random.Random(100 * seed + which), 0.0
        while (at := at + draw.expovariate(1 / GAP)) < 120:
            length = draw.uniform(*STALL)
            events += [(at, which, signal.SIGSTOP), (at + length, which, signal.SIGCONT)]
            at += length
    return sorted(events)


def measure(mode: str, nodes: int, seed: int, lasting: float) -> dict[str, Any]:
    """Run one mode; return its batches per second and its end."""
    with tempfile.TemporaryDirectory() as place:
        folder, port = Path(place), free_port()
        common = {**os.environ, "OMP_NUM_THREADS": "1", "HIERCOMM_LIGHTHOUSE": f"127.0.0.1:{port}"}
        command = [sys.executable, "-m", "lightning_hiercomm", "lighthouse", "--bind", f"127.0.0.1:{port}"]
        command += ["--min-nodes", str(FEWEST), "--dead-after", str(DEAD_AFTER)]
        lighthouse = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        lives = [0] * nodes

        def start(which: int) -> subprocess.Popen[bytes]:
            own = {"HIERCOMM_NODE": str(which), "TORCHELASTIC_RESTART_COUNT": str(lives[which])}
            if mode == "blocking":
                own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port + 1), "RANK": str(which), "LOCAL_RANK": "0"}
                own |= {"WORLD_SIZE": str(nodes), "GROUP_RANK": str(which), "LOCAL_WORLD_SIZE": "1"}
                own |= {"TORCHELASTIC_RUN_ID": "late"}
            chosen = [place, mode, str(nodes), str(seed), str(lasting)]
            arguments = [sys.executable, "-m", __spec__.name, "--node", *chosen]
            log = (folder / f"{which}.{lives[which]}.log").open("w")
            return subprocess.Popen(arguments, env={**common, **own}, stderr=log, stdout=log)

        time.sleep(1.0)
        running = [start(which) for which in range(nodes)]
        try:
            deadline = time.monotonic() + 60
            while len(list(folder.glob("*.steps"))) < nodes and time.monotonic() < deadline:
                time.sleep(0.05)
            began, events = time.time(), [] if mode == "no stalls" else stalls(nodes, seed)
            stopped = 0
            while any(each.poll() is None for each in running) and time.time() - began < 240:
                while events and events[0][0] < time.time() - began:
                    _, which, number = events.pop(0)
                    if running[which].poll() is None:
                        running[which].send_signal(number)
                        stopped += number == signal.SIGSTOP
                for which, each in enumerate(running):
                    if each.poll() not in (None, 0, 69) and lives[which] < 9:
                        lives[which] += 1
                        running[which] = start(which)
                time.sleep(0.01)
        finally:
            for each in [*running, lighthouse]:
                if each.poll() is None:
                    each.kill()
                each.wait()
        times = [[float(line) for line in path.read_text().split()] for path in folder.glob("*.steps")]
        begins, ends = max(each[0] for each in times), max(each[-1] for each in times)
        batches = sum(begins <= each <= ends for of_node in times for each in of_node)
        results = [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))]
        if not results:
            print("\n".join(path.read_text()[-2000:] for path in folder.glob("*.log")), file=sys.stderr)
        return {
            "mode": mode,
            "seed": seed,
            "rate": batches / (ends - begins),
            "seconds": ends - begins,
            "stalls": stopped,
            "restarts": sum(lives),
            "ended": len(results),
            "accuracy": [each["accuracy"] for each in results],
            "counts": results[0]["counts"] if results else {},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lasting", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--node", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.node:
        node(Path(given.node[0]), given.node[1], int(given.node[2]), int(given.node[3]), float(given.node[4]))
        return
    for seed in range(given.seeds):
        base = None
        for mode in given.modes:
            run = measure(mode, given.nodes, seed, given.lasting)
            base = base or run["rate"]
            merged = run["counts"].get("late_merges", 0)
            print(
                f"| {seed} | {mode} | {run['seconds']:.1f} | {run['rate'] / base:.1%} | {run['stalls']} |"
                f" {merged:.0f} | {run['restarts']} | {run['ended']} | {max(run['accuracy'], default=0.0):.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

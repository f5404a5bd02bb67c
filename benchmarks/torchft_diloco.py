"""A node of torchft's own DiLoCo, which `elastic_faults` compares with ours: model, data and pace of `elastic_node`.

`python torchft_diloco.py SETTINGS` (JSON, see `Node`), or `... lighthouse ADDRESS DEAD_AFTER`. Written as torchft's
example of DiLoCo is: a loop, its `Manager`, its `ProcessGroupGloo`, its `DiLoCo`, one rank a node.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "jobs"))

from elastic_node import Net, data, go_to_namespace, incarnation, loss_of


@dataclass
class Node:
    """What a node does.

    Attributes:
        folder: Where it writes.
        every: Inner steps between synchronizations.
        pause: Seconds that a step takes.
        timeout: Seconds, of the `Manager` and its process group.
        seed: Of the parameters.
        elastic: What ours is given; not used.
        scheme: The same.
        epochs: The same.
        batches: The same.
    """

    folder: str
    every: int
    pause: float
    timeout: float
    seed: int = 0
    elastic: dict[str, Any] = field(default_factory=dict)
    scheme: str = ""
    epochs: int = 0
    batches: int = 0


def main(node: Node) -> None:
    name, folder = os.environ["HIERCOMM_NODE"], Path(node.folder)
    mark = lambda what: (folder / f"{name}.{incarnation()}.{what}").touch()  # noqa: E731
    address = os.environ.get("NODE_ADDRESS", "127.0.0.1")
    socket.gethostname = lambda: address  # by which healing is offered, and which nothing resolves here
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    model = Net(0.0, 1000 * node.seed + sum(map(ord, name)))
    inner = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 1000)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])
        schedule.load_state_dict(state["schedule"])

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "inner": inner.state_dict(), "schedule": schedule.state_dict()}

    mark("asks")
    seconds = timedelta(seconds=node.timeout)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=seconds),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=seconds,
        quorum_timeout=timedelta(seconds=60),
        connect_timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr="http://" + os.environ["HIERCOMM_LIGHTHOUSE"],
        replica_id=name,
        hostname=address,
    )
    x, y, _ = data(4096).tensors
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    has_begun = False
    with DiLoCo(manager, [model], inner, outer, sync_every=node.every) as diloco:
        while True:
            time.sleep(node.pause)
            batch = torch.randint(len(x), (8,), generator=generator)
            inner.zero_grad()
            torch.nn.functional.cross_entropy(model.net(x[batch]), y[batch]).backward()
            inner.step()  # and synchronizes
            schedule.step()
            step = manager.current_step() * node.every + diloco._local_step
            with (folder / f"{name}.steps").open("a") as file:
                file.write(f"{time.time():.3f} {step}\n")
            if not has_begun and manager.current_step() > 0:
                has_begun = True
                mark("began")
                mark("trains")
            end = folder / "end"
            if end.exists() and step >= int(end.read_text()):
                break
    values = b"".join(value.detach().numpy().tobytes() for _, value in sorted(model.named_parameters()))
    said = {
        "parameters": hashlib.sha256(values).hexdigest()[:16],
        "global_step": step,
        "loss": loss_of(model),
    }
    (folder / f"{name}.json").write_text(json.dumps(said))
    manager.shutdown(wait=False)
    os._exit(0)


def lighthouse(bind: str, dead_after: float) -> None:
    server = LighthouseServer(
        bind=bind, min_replicas=1, join_timeout_ms=60000, quorum_tick_ms=50, heartbeat_timeout_ms=int(1000 * dead_after)
    )
    signal.pause()
    server.shutdown()


if __name__ == "__main__":
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    logging.getLogger("torchft").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    if os.environ.get("NAMESPACE"):
        go_to_namespace(os.environ["NAMESPACE"])
    if sys.argv[1] == "lighthouse":
        lighthouse(sys.argv[2], float(sys.argv[3]))
    else:
        main(Node(**json.loads(sys.argv[1])))

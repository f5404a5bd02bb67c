"""torchft's LocalSGD and DiLoCo: every rank is a replica group, and the lighthouse runs on rank 0's node."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import closing
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

from benchmarks.job import Recorder


def train(recorder: Recorder, options: dict[str, Any]) -> None:
    """``kind``: "local_sgd", "diloco" (one bucket for all) or "streaming" (fragments, sent while training)."""
    logging.disable(logging.INFO)
    world = recorder.world
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=world.size) if world.rank == 0 else None
    address: list[Any] = [lighthouse.address() if lighthouse else None]
    dist.broadcast_object_list(address, src=0)

    model = recorder.model()
    optimizer = recorder.optimizer(model)
    host = "127.0.0.1" if os.environ["GLOO_SOCKET_IFNAME"] == "lo" else socket.gethostname()
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=world.size,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=address[0],
        replica_id=f"replica{world.rank}",
        init_sync=False,
    )
    with closing(_Shutdown(manager, lighthouse)), _averaging(manager, model, optimizer, options):
        last = False
        while not last:
            optimizer.zero_grad()
            recorder.loss(model, recorder.next_batch()).backward()
            optimizer.step()
            last = recorder.step_done()
            if recorder.evaluation_due() and not last:
                recorder.evaluate_mean(model)
        recorder.finish(model)
        dist.barrier()


def _averaging(manager: Manager, model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> Any:
    period = options["sync_every"]
    if options["kind"] == "local_sgd":
        return LocalSGD(manager, model, optimizer, sync_every=period)
    streaming = options["kind"] == "streaming"
    fragments = _halves(model) if streaming else [model]
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in fragments]
    return DiLoCo(
        manager,
        fragments,
        optimizer,
        outer,
        sync_every=period,
        use_bucketization=not streaming,
        bucket_cap_mb=1024,
        fragment_sync_delay=period // 2 - 1 if streaming else 0,
    )


def _halves(model: nn.Module) -> list[nn.Module]:
    """Two fragments of about equal size."""
    layers = [layer for layer in model.children() if any(True for _ in layer.parameters())]
    return [nn.Sequential(*layers[: len(layers) // 2]), nn.Sequential(*layers[len(layers) // 2 :])]


class _Shutdown:
    def __init__(self, manager: Manager, lighthouse: LighthouseServer | None) -> None:
        self._manager, self._lighthouse = manager, lighthouse

    def close(self) -> None:
        self._manager.shutdown(wait=False)
        if self._lighthouse is not None:
            self._lighthouse.shutdown()

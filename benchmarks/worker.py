"""A rank: does the jobs of a file in turn and writes one record for each. Started by torchrun.

``python -m torch.distributed.run ... -m benchmarks.worker JOBS.json FOLDER``
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.contenders import ROWS
from benchmarks.job import Job, Recorder, World
from benchmarks.network import transmitted_bytes


def main(jobs_file: str, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    world = World.from_environment()
    jobs = [Job(**description) for description in json.loads(Path(jobs_file).read_text())]
    on_gpu = jobs[0].device == "cuda"
    if on_gpu:
        # nccl refuses two ranks of one host on one GPU; nodes of different names talk over sockets
        os.environ.update(NCCL_HOSTID=f"node{world.node}", NCCL_IB_DISABLE="1", NCCL_MNNVL_ENABLE="0")
        os.environ["NCCL_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"]
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=120))
    for number, job in enumerate(jobs):
        recorder = Recorder(job, world, os.environ["GLOO_SOCKET_IFNAME"])
        dist.barrier()
        try:
            with _traffic(recorder) if job.trace and world.local_rank == 0 else contextlib.nullcontext():
                row = ROWS[job.row]
                importlib.import_module(f"benchmarks.contenders.{row.module}").train(recorder, row.options)
        except BaseException as error:
            recorder.record.error = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            _write(recorder, folder)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # other ranks may be waiting in a collective: torchrun ends them
        _write(recorder, folder)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        if world.rank == 0:
            (Path(folder) / f"{number}.done").touch()
    # Libraries differ in how they leave; nothing is left to be done here.
    os._exit(0)


@contextlib.contextmanager
def _traffic(recorder: Recorder, interval: float = 0.005) -> Iterator[None]:
    """Sample the bytes this node has sent, from a thread."""
    interface, done = os.environ["GLOO_SOCKET_IFNAME"], threading.Event()

    def sample() -> None:
        while not done.wait(interval):
            recorder.record.traffic.append((time.monotonic(), transmitted_bytes(interface)))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _write(recorder: Recorder, folder: str) -> None:
    record = recorder.record
    path = Path(folder) / f"{record.job}.rank{record.rank}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record.to_dict()))
    partial.rename(path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

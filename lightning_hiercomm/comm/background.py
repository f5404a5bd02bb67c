"""Moves one after another in parallel with training: on a thread on CPU, on a stream on CUDA."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from torch.futures import Future

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.base import Completion, Handle, completed_future
from lightning_hiercomm.comm.meter import Meter

_LINGERING_SECONDS = 0.5
"""Of a thread without work: to start one takes as long as to sum a megabyte."""


class Background:
    """Work that waits for a move, then does the next one, without the training thread waiting for either.

    Jobs run in the order they were submitted, which is the same on every rank, so moves that only one background
    launches on a communicator match up. A communicator used by its jobs must not be used elsewhere: take it from
    :meth:`lightning_hiercomm.nodes.topology.Topology.duplicate`.

    On CPU it is a thread (gloo and MPI waits release the interpreter lock), started by the first job. On CUDA it is a
    stream: jobs are enqueued at once from the calling thread and the device keeps their order.

    Where such a job would let the host wait (for moves between nodes over gloo or MPI), it is put off until somebody
    waits for it, or for one behind it: those moves make progress by themselves, and the calling thread still launches
    everything in one order, as nccl wants it of communicators that share a device: "users must ensure the order of
    host-side launches matches for all devices" ("Using multiple NCCL communicators concurrently",
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html). On the device nothing orders a
    job's moves and training's, which is the point of it; from nccl 2.26 on ``NCCL_LAUNCH_ORDER_IMPLICIT=1`` lets nccl
    start them in the order of their launches, so that no two wait for each other (docs/howto/start_a_run.md).

    Args:
        device: Where the tensors live.
        meter: Times the training thread's waits for the jobs.
        tier: What the meter files those waits under.
        puts_off: Whether jobs let the host wait; means nothing on CPU.
    """

    def __init__(self, device: torch.device, meter: Meter, tier: str = "inter", puts_off: bool = False) -> None:
        self._device = device
        self._meter = meter
        self._tier = tier
        self._stream = streams.new(device) if streams.has(device) else None
        self._put_off: deque[_PutOff] | None = deque() if puts_off else None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], object]) -> Handle:
        """Run ``work``, which may wait for handles, after everything submitted before. An error reaches the waiter."""
        if self._stream is not None:
            return Timed(self._enqueue(self._stream, work), self._meter, self._tier, self._device)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"hiercomm-{self._tier}", daemon=True)
            self._thread.start()
        job = Job(work)
        self._jobs.put(job)
        return Timed(job, self._meter, self._tier, self._device)

    def read(self, numbers: Callable[[], Tensor]) -> Reading:
        """Compute numbers for the host, after everything submitted before."""
        copies: list[Tensor] = []
        if self._stream is None:
            return Reading(self.submit(lambda: copies.append(numbers())), copies)
        return Reading(self._enqueue(self._stream, lambda: copies.append(streams.to_host(numbers()))), copies)

    def _enqueue(self, stream: torch.cuda.Stream, work: Callable[[], object]) -> _StreamJob:
        if self._put_off is not None:
            return _PutOff(stream, self._device, work, self._put_off, self._meter)
        # where the host waits all the same, as over gloo inside a node, training's stream runs out of work meanwhile
        with self._meter.waiting(self._tier, self._device), self._meter.beside_training():
            return _StreamJob(stream, self._device, work)

    def uses(self, tensor: Tensor) -> None:
        """Say that jobs use a tensor made by training, so that CUDA does not reuse its memory too early."""
        if self._stream is not None:
            streams.keep_for(self._stream, tensor)

    def hands_out(self, tensor: Tensor) -> None:
        """Say that a tensor made by a job is now used by the current stream, for the same reason."""
        if self._stream is not None:
            streams.keep_here(tensor)

    def close(self, timeout: float = 10.0) -> None:
        """End the thread after the jobs submitted so far, or leave it behind after ``timeout`` seconds."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout)
            self._thread = None

    def _run(self) -> None:
        with self._meter.beside_training():
            while (job := self._jobs.get()) is not None:
                job.run()


class _StreamJob(Handle):
    """Work for a stream, after what the current one has got so far."""

    def __init__(self, stream: torch.cuda.Stream, device: torch.device, work: Callable[[], object]) -> None:
        self._stream = stream
        self._device = device
        self._run(streams.mark(device), work)

    def _run(self, ready: torch.cuda.Event, work: Callable[[], object]) -> None:
        self._stream.wait_event(ready)
        with streams.within(self._stream):
            work()
            self._end = streams.mark(self._device)

    def wait(self) -> None:
        streams.current(self._device).wait_event(self._end)

    def wait_on_host(self) -> None:
        """Return when the stream has done it."""
        self._end.synchronize()

    def is_done(self) -> bool:
        return bool(self._end.query())

    def future(self, value: Tensor) -> Future[Tensor]:
        with streams.within(self._stream):
            return completed_future(value)


class _PutOff(_StreamJob):
    """A job that runs when it, or a later job, is waited for."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        device: torch.device,
        work: Callable[[], object],
        put_off: deque[_PutOff],
        meter: Meter,
    ) -> None:
        self._stream = stream
        self._device = device
        self._ready = streams.mark(device)  # it waits for what training has got until now, not until it is done
        self._work: Callable[[], object] | None = work
        self._error: BaseException | None = None
        self._put_off = put_off
        self._meter = meter
        put_off.append(self)

    def wait(self) -> None:
        self._catch_up()
        super().wait()

    def wait_on_host(self) -> None:
        self._catch_up()
        super().wait_on_host()

    def is_done(self) -> bool:
        # not whether the device has done it, too: ranks would not answer alike, and launch what follows in other orders
        return self._work is None

    def future(self, value: Tensor) -> Future[Tensor]:
        self._catch_up()
        return super().future(value)

    def _catch_up(self) -> None:
        while self._work is not None:
            job = self._put_off.popleft()
            work, job._work = job._work, None
            assert work is not None
            try:
                with self._meter.beside_training():  # the thread that waits for the job counts all of it
                    job._run(job._ready, work)
            except BaseException as error:  # reaches the thread that waits for that job, and not for one behind it
                job._error = error
                if not isinstance(error, Exception):
                    raise
        if self._error is not None:
            raise self._error


class Reading(Handle):
    """Numbers on their way to the host.

    To look at a tensor (``.item()``) is to wait for all that the current stream has been told, so for training, which
    on CUDA is ahead of the device by a step or more ("Asynchronous execution" in
    https://docs.pytorch.org/docs/stable/notes/cuda.html). These are copied in the jobs' own stream, and nobody waits
    for more than the jobs before them.

    Args:
        job: Makes the copies.
        copies: Where it leaves them.
    """

    def __init__(self, job: Handle, copies: list[Tensor]) -> None:
        self._job = job
        self._copies = copies

    def wait(self) -> None:
        if isinstance(self._job, _StreamJob):
            self._job.wait_on_host()
        else:
            self._job.wait()

    def is_done(self) -> bool:
        return self._job.is_done()

    def numbers(self) -> list[float]:
        """What has been read; the host waits for it."""
        self.wait()
        return [float(number) for number in self._copies[0].tolist()]


class Timed(Handle):
    """A handle whose waits are exposed time.

    Args:
        handle: What is waited for.
        meter: Times the training thread's waits.
        tier: What the meter files them under.
        device: Where the tensors live.
    """

    def __init__(self, handle: Handle, meter: Meter, tier: str, device: torch.device) -> None:
        self._handle = handle
        self._meter = meter
        self._tier = tier
        self._device = device

    def wait(self) -> None:
        with self._meter.waiting(self._tier, self._device):
            self._handle.wait()

    def is_done(self) -> bool:
        return self._handle.is_done()

    def future(self, value: Tensor) -> Future[Tensor]:
        with self._meter.waiting(self._tier, self._device):  # for a job that was put off
            return self._handle.future(value)


class Job(Handle):
    """Work that another thread does: it calls :meth:`run`, once."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work
        self._completion = Completion()

    def run(self) -> None:
        """Do it. An error reaches the waiter."""
        assert self._work is not None
        error: BaseException | None = None
        try:
            self._work()
        except BaseException as raised:
            error = raised
        self._work = None  # frees what the closure holds
        self._completion.end(error)

    def wait(self) -> None:
        self._completion.wait()

    def is_done(self) -> bool:
        return self._completion.is_done()

    def future(self, value: Tensor) -> Future[Tensor]:
        return self._completion.future(value)


class Turns:
    """Moves one after another, on a thread that lives as long as there are any, and a little longer."""

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._has_thread = False

    def take(self, work: Callable[[], object]) -> Handle:
        """Do a move when all before it have ended on this rank. An error reaches the waiter."""
        job = Job(work)
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()
            if not self._has_thread:
                threading.Thread(target=self._run, name="hiercomm-turns", daemon=True).start()
                self._has_thread = True  # not if that failed
        return job

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._waiting, timeout=_LINGERING_SECONDS):
                    self._has_thread = False
                    return
                job = self._waiting.popleft()
            with Meter.beside_training():
                job.run()

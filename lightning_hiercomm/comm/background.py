"""Jobs in parallel with training, one after another: on a thread on CPU, on a stream on CUDA."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from torch.futures import Future

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.base import CommunicationError, Handle, completed_future, future_of
from lightning_hiercomm.comm.meter import Meter

_IDLE_SECONDS = 0.5
"""Seconds after which an idle thread ends; starting one takes as long as summing a megabyte."""


class JobThread:
    """Runs jobs one after another on a daemon thread, which ends when it is idle."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def submit(self, work: Callable[[], object]) -> Handle:
        """Run ``work`` after everything submitted before. An error reaches the waiter."""
        job = _Job(work)
        with self._changed:
            self._is_closing = False
            self._jobs.append(job)
            self._changed.notify()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread  # not if starting it failed
        return job

    def close(self, timeout: float) -> None:
        """End the thread after the jobs submitted so far, or leave it behind after ``timeout`` seconds."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closing, timeout=_IDLE_SECONDS)
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
            with Meter.overlapped():
                job.run()


class _Job(Handle):
    """Work for another thread, which calls :meth:`run` once."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._futures: list[tuple[Future[Tensor], Tensor]] = []

    def run(self) -> None:
        assert self._work is not None
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._work = None  # frees what the closure holds
        with self._lock:
            self._ended.set()
            futures, self._futures = self._futures, []
        for future, value in futures:
            self._complete(future, value)

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def is_done(self) -> bool:
        return self._ended.is_set()

    def future(self, value: Tensor) -> Future[Tensor]:
        future = future_of(value)
        with self._lock:
            if not self._ended.is_set():
                self._futures.append((future, value))
                return future
        self._complete(future, value)
        return future

    def _complete(self, future: Future[Tensor], value: Tensor) -> None:
        error = self._error
        if error is None:
            future.set_result(value)
            return
        if not isinstance(error, Exception):  # torch's futures take no other
            error = CommunicationError(f"a collective was interrupted by {error!r}")
        future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it so


class Background:
    """Jobs that wait for a collective and start the next, while training waits for neither.

    Jobs run in the order of submission, which is the same on every rank, so their collectives match. Communicators of
    jobs must not be used elsewhere: use :meth:`lightning_hiercomm.nodes.topology.Topology.duplicate`.

    On CPU, jobs run on a thread (gloo and MPI release the interpreter lock in waits). On CUDA, the calling thread
    enqueues them at once on a stream.

    Jobs on CUDA that block the host (collectives between nodes over gloo or MPI) are deferred until they, or later
    jobs, are waited for. Their collectives make progress without that. The calling thread still launches everything
    in one order, which nccl needs of communicators that share a device: "users must ensure the order of host-side
    launches matches for all devices" ("Using multiple NCCL communicators concurrently",
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html). On the device, collectives of
    jobs and of training have no order. With nccl 2.26 or newer, ``NCCL_LAUNCH_ORDER_IMPLICIT=1`` starts them in the
    order of their launches, so that they cannot wait for each other (docs/howto/start_a_run.md).

    Args:
        device: The tensors' device.
        meter: Times the training thread's waits for the jobs.
        defers: Whether jobs block the host; without effect on CPU.
    """

    def __init__(self, device: torch.device, meter: Meter, defers: bool = False) -> None:
        self._device = device
        self._meter = meter
        self._stream = streams.new(device) if streams.has(device) else None
        self._defers = defers
        self._queue: deque[_StreamJob] = deque()
        self._thread = JobThread("hiercomm-inter")

    def submit(self, work: Callable[[], object]) -> Handle:
        """Run ``work``, which may wait for handles, after everything submitted before. An error reaches the waiter."""
        job = self._thread.submit(work) if self._stream is None else self._enqueue(self._stream, work)
        return Timed(job, self._meter, "inter", self._device)

    def read(self, numbers: Callable[[], Tensor]) -> Reading:
        """Compute numbers for the host, after everything submitted before."""
        copies: list[Tensor] = []
        if self._stream is None:
            return Reading(self.submit(lambda: copies.append(numbers())), copies)
        return Reading(self._enqueue(self._stream, lambda: copies.append(streams.to_host(numbers()))), copies)

    def _enqueue(self, stream: torch.cuda.Stream, work: Callable[[], object]) -> _StreamJob:
        job = _StreamJob(stream, self._device, work, self._queue, self._defers)
        if not self._defers:
            # gloo inside a node blocks the host here, and the stream of training runs out of work
            with self._meter.waiting("inter", self._device):
                job.run()
        return job

    def uses(self, tensor: Tensor) -> None:
        """Record that jobs use a tensor made by training, so that CUDA does not reuse its memory too early."""
        if self._stream is not None:
            streams.keep_for(self._stream, tensor)

    def hands_out(self, tensor: Tensor) -> None:
        """Record that the current stream uses a tensor made by a job, for the same reason."""
        if self._stream is not None:
            streams.keep_here(tensor)

    def close(self, timeout: float = 10.0) -> None:
        """End the thread after the jobs submitted so far, or leave it behind after ``timeout`` seconds."""
        self._thread.close(timeout)


class _StreamJob(Handle):
    """Work for a stream, after the work that the current stream has now.

    Args:
        stream: The stream.
        device: Its device.
        work: Enqueues the work.
        queue: The jobs that have not run; :meth:`run` runs them in order.
        is_deferred: Whether it runs when it, or a later job, is waited for.
    """

    _end: torch.cuda.Event  # after it has run

    def __init__(
        self,
        stream: torch.cuda.Stream,
        device: torch.device,
        work: Callable[[], object],
        queue: deque[_StreamJob],
        is_deferred: bool,
    ) -> None:
        self._stream = stream
        self._device = device
        self._ready = streams.mark(device)
        self._work: Callable[[], object] | None = work
        self._error: BaseException | None = None
        self._queue = queue
        self._is_deferred = is_deferred
        queue.append(self)

    def run(self) -> None:
        """Run the jobs up to this one, unless they have run; raise its error."""
        while self._work is not None:
            job = self._queue.popleft()
            work, job._work = job._work, None
            assert work is not None
            try:
                with Meter.overlapped():  # the caller counts its wait for the job
                    self._stream.wait_event(job._ready)
                    with streams.within(self._stream):
                        work()
                        job._end = streams.mark(self._device)
            except BaseException as error:  # reaches waiters of that job, not of later ones
                job._error = error
                if not isinstance(error, Exception):
                    raise
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        self.run()
        streams.current(self._device).wait_event(self._end)

    def wait_on_host(self) -> None:
        self.run()
        self._end.synchronize()

    def is_done(self) -> bool:
        # whether the device has finished differs between ranks, which would launch later work in different orders
        return self._work is None if self._is_deferred else bool(self._end.query())

    def future(self, value: Tensor) -> Future[Tensor]:
        self.run()
        with streams.within(self._stream):
            return completed_future(value)


class Reading(Handle):
    """Numbers that are copied to the host, in the stream of the jobs.

    ``.item()`` would wait for all work of the current stream: on CUDA, training is ahead of the device by a step or
    more ("Asynchronous execution" in https://docs.pytorch.org/docs/stable/notes/cuda.html).
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
        """Return the numbers; blocks the host."""
        self.wait()
        return [float(number) for number in self._copies[0].tolist()]


class Timed(Handle):
    """A handle whose waits are counted as exposed time."""

    def __init__(self, handle: Handle, meter: Meter, level: str, device: torch.device) -> None:
        self._handle = handle
        self._meter = meter
        self._level = level
        self._device = device

    def wait(self) -> None:
        with self._meter.waiting(self._level, self._device):
            self._handle.wait()

    def is_done(self) -> bool:
        return self._handle.is_done()

    def future(self, value: Tensor) -> Future[Tensor]:
        with self._meter.waiting(self._level, self._device):  # of deferred jobs
            return self._handle.future(value)

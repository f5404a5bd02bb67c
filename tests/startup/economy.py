"""Settings that save CPU time in processes of tests."""

import os

import torch


def wait_for_turns() -> None:
    """Let threads of this process, and of those it starts, wait for their turn when they are woken (Linux only).

    Or they take a processor from a thread of gloo's that holds a connection's lock, and a thread that wants it asks
    again and again, a thousand times in an all-reduce of four ranks on two processors.
    """
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def wait_for_turns_in_forks() -> None:
    """The same in what this process forks, but not in itself: threads that hand each other a lock lose by it."""
    os.register_at_fork(after_in_child=wait_for_turns)


def ask_for_gpus_once() -> None:
    """Where there is none, none will come; torch asks the driver at every step of Adam."""
    if not torch.cuda.is_available():
        torch.cuda._cached_device_count = 0

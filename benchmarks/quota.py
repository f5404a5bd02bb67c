"""Machines of unequal speed on one machine: processes that get only a part of a CPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

_PERIOD = 0.02  # seconds
_CGROUPS = Path("/sys/fs/cgroup")


class CpuQuota:
    """Leaves this process the given share of one CPU, all its threads together.

    By a control group (v1 or v2) where this user may make one; else a second process stops and continues it by signals
    50 times a second. May be set again while it runs.

    Args:
        share: CPU seconds per second; 1 is one CPU.
    """

    def __init__(self, share: float) -> None:
        self._pid = os.getpid()
        self._folder = _make_group(f"hiercomm-{self._pid}")
        self._stopper: subprocess.Popen[bytes] | None = None
        self.set(share)
        if self._folder is not None:
            (self._folder / "cgroup.procs").write_text(str(self._pid))

    def set(self, share: float) -> None:
        """Change the share."""
        quota, period = int(share * _PERIOD * 1e6), int(_PERIOD * 1e6)
        if self._folder is None:
            self._end_stopper()
            command = [sys.executable, __file__, str(self._pid), str(share)]
            self._stopper = subprocess.Popen(command) if share < 1 else None
        elif (self._folder / "cpu.max").exists():
            (self._folder / "cpu.max").write_text(f"{quota} {period}")
        else:
            (self._folder / "cpu.cfs_period_us").write_text(str(period))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota))

    def close(self) -> None:
        """Take the limit away."""
        self._end_stopper()
        if self._folder is not None:
            with contextlib.suppress(OSError):  # the process may have gone
                (self._folder.parent / "cgroup.procs").write_text(str(self._pid))
            self._folder.rmdir()
            self._folder = None

    def _end_stopper(self) -> None:
        if self._stopper is not None:
            self._stopper.kill()
            self._stopper.wait()
            self._stopper = None
            os.kill(self._pid, signal.SIGCONT)


def _make_group(name: str) -> Path | None:
    for parent in (_CGROUPS / "cpu", _CGROUPS):  # version 1, version 2
        folder = parent / name
        try:
            folder.mkdir(exist_ok=True)
        except OSError:
            continue
        if (folder / "cpu.cfs_quota_us").exists() or (folder / "cpu.max").exists():
            return folder
        folder.rmdir()
    return None


def _stop_and_continue(pid: int, share: float) -> None:
    import time

    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(_PERIOD * (1 - share))
            os.kill(pid, signal.SIGCONT)
            time.sleep(_PERIOD * share)


if __name__ == "__main__":
    _stop_and_continue(int(sys.argv[1]), float(sys.argv[2]))

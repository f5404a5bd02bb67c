"""The processes of ranks, and what ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from lightning_hiercomm.control import process

STOPS = """
import os, signal
from lightning_hiercomm.control import process
print(process.identity(), flush=True)
while True:  # continued, it stops again
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def stopped():
    """A stopped child, and its identity, as it gives it itself."""
    child = subprocess.Popen([sys.executable, "-c", STOPS], stdout=subprocess.PIPE, text=True)
    said = child.stdout.readline().removesuffix("\n")
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    yield child, said
    child.kill()
    child.communicate()


def test_a_stopped_process_is_ended_by_who_knows_it(stopped):
    child, identity = stopped
    process.end_frozen(identity)
    assert child.wait(timeout=5) == -signal.SIGKILL


@pytest.mark.parametrize(
    "another", [lambda who: f"other {who}", lambda who: f"{who}0", lambda who: ""], ids=["machine", "later", "unknown"]
)
def test_no_other_process_is_ended(stopped, another):
    child, identity = stopped
    process.end_frozen(another(identity))
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.1)


def test_a_process_has_ended_when_its_parent_has_not_waited_for_it_yet(stopped):
    child, identity = stopped
    assert not process.has_ended(identity)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.has_ended(identity)
    assert not process.has_ended(f"other {identity}")
    assert not process.has_ended("")

import subprocess
import sys
from pathlib import Path

from ports import free_port


def test_processes_that_do_not_listen_yet_are_given_other_ports():
    ask = "from ports import free_port; print(*(free_port() for _ in range(400)), flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", ask],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        theirs = {*map(int, other.stdout.readline().split())}
        own = {free_port() for _ in range(400)}
        other.communicate("\n")
    assert len(theirs) == len(own) == 400
    assert not theirs & own

"""What strikes a node of an elastic run once, at a moment of its n-th synchronization."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_hiercomm.comm.base import finished
from lightning_hiercomm.elastic import groups, healing, rendezvous, topology, vote

_AROUND = (
    (rendezvous.Rendezvous, "form", "before the quorum", ""),
    (topology.ElasticTopology, "connect_members", "", "after the quorum"),
    (vote.Vote, "decide", "before the vote", "after the vote"),
    (healing.Healing, "fetch", "while it is healed", ""),
    (healing.Healing, "_put", "while it heals", ""),
)
"""Methods, and the moments before and after their calls."""


class Fault:
    """Strikes this process at a moment of its n-th synchronization, once: the node's next incarnation goes on."""

    def __init__(self, fault: str, folder: Path, name: str) -> None:
        self.what, self.moment, number = fault.split(":")
        self.at, self.done = int(number), folder / f"{name}.struck"
        self.seen = 0

    def __call__(self, moment: str) -> bool:
        """Strike, if it is time; whether it was."""
        if moment != self.moment or self.done.exists():
            return False
        if self.what in ("close", "mute") and dist.get_rank() != 1:
            return False
        self.seen += 1
        if self.seen < self.at:
            return False
        self.done.touch()
        if self.what == "slow":
            time.sleep(3.0)
        elif self.what in ("kill", "stop"):
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.what])
        return True

    def install(self) -> None:
        for owner, name, before, after in _AROUND:
            setattr(owner, name, self._around(getattr(owner, name), before, after))
        launch = groups.InterNodeGroup._launch

        def launches(own: Any, start: Any) -> Any:
            if self.what == "mute" and self("in the exchange"):
                return finished
            move = launch(own, start)
            if self("in the exchange") and self.what == "close":
                move.wait()
                own._group.close()
            return move

        groups.InterNodeGroup._launch = launches

    def _around(self, call: Any, before: str, after: str) -> Any:
        def struck(*args: Any) -> Any:
            self(before)
            result = call(*args)
            self(after)
            return result

        return struck

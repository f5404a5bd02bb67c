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
        form, connect = rendezvous.Rendezvous.form, topology.ElasticTopology.connect_members
        decide, launch = vote.Vote.decide, groups.InterNodeGroup._launch
        fetch, put = healing.Healing.fetch, healing.Healing._put

        def forms(own: Any, *args: Any) -> Any:
            self("before the quorum")
            return form(own, *args)

        def connects(own: Any, *args: Any) -> Any:
            error = connect(own, *args)
            self("after the quorum")
            return error

        def decides(own: Any, *args: Any) -> Any:
            self("before the vote")
            is_kept = decide(own, *args)
            self("after the vote")
            return is_kept

        def launches(own: Any, start: Any) -> Any:
            if self.what == "mute" and self("in the exchange"):
                return finished
            move = launch(own, start)
            if self("in the exchange") and self.what == "close":
                move.wait()
                own._group.close()
            return move

        def fetches(own: Any, *args: Any) -> Any:
            self("while it is healed")
            return fetch(own, *args)

        def puts(own: Any, *args: Any) -> None:
            self("while it heals")
            put(own, *args)

        rendezvous.Rendezvous.form, topology.ElasticTopology.connect_members = forms, connects
        vote.Vote.decide, groups.InterNodeGroup._launch = decides, launches
        healing.Healing.fetch, healing.Healing._put = fetches, puts

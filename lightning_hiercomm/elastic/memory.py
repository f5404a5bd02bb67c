"""The lighthouse's records of runs, so that no run starts again at step 0 by accident."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lightning_hiercomm.elastic.quorum import NodeRefused, Request, RunRecord, compute_quorum

_KEY = "hiercomm_runs"


@dataclass(frozen=True)
class RunMemory:
    """The lighthouse's ``min_nodes`` and its records of all runs; its observer sends them in every quorum."""

    min_nodes: int = 1
    runs: Mapping[str, RunRecord] = field(default_factory=dict)

    def record(self, run: str) -> RunRecord:
        return self.runs.get(run, RunRecord())

    def after(self, answer: Sequence[Any]) -> RunMemory:
        """Return the memory after a quorum whose participants have sent this data."""
        requests = [request for data in answer if (request := Request.from_json(data)) is not None]
        runs = dict(self.runs)
        for run in {request.run for request in requests}:
            of_run = [request for request in requests if request.run == run]
            record = self.record(run)
            runs[run] = self._begun(of_run, record) or record.after(of_run)
        return replace(self, runs=runs)

    def _begun(self, requests: Sequence[Request], record: RunRecord) -> RunRecord | None:
        """Return the record of the fit that begins with this quorum, if one does."""
        for request in requests:
            with contextlib.suppress(NodeRefused, SystemExit):  # the refused node handles it
                quorum = compute_quorum(requests, request.replica_id, record, self.min_nodes)
                if quorum.begins:
                    return RunRecord(quorum.fit, has_trained=any(member.checkpoint_step for member in quorum.members))
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the observer's data for the next quorum."""
        return {_KEY: {"min_nodes": self.min_nodes, "runs": {run: asdict(each) for run, each in self.runs.items()}}}

    @classmethod
    def find(cls, answer: Sequence[Any]) -> RunMemory | None:
        """Find the observer's memory in a quorum's data; None if no observer took part."""
        for data in answer:
            with contextlib.suppress(TypeError, KeyError, AttributeError, ValueError):  # sent by a node
                found = data[_KEY]
                return cls(int(found["min_nodes"]), {run: RunRecord(**each) for run, each in found["runs"].items()})
        return None

"""The state of the schemes in a checkpoint, for whole parameters also where each rank holds a shard."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_hiercomm.comm.autocast import outside_autocast
from lightning_hiercomm.comm.dtensor import local
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.schemes import RunningScheme, Scheme

_COUNTERS = ("steps", "step_in_epoch", "epoch")
"""The entries that mean the same in every scheme."""


class SchemeStates:
    """Saves and restores the schemes of a run, one per optimizer."""

    def __init__(self, schemes: Sequence[RunningScheme[Scheme]], replicas: Replicas) -> None:
        self._schemes = schemes
        self._replicas = replicas
        self._last: list[dict[str, Any]] | None = None

    @outside_autocast()
    def state(self, together: bool = True) -> list[dict[str, Any]]:
        """Return each scheme's state that all replicas share.

        Args:
            together: Whether all ranks call this, which makes it collective. Otherwise return what this rank holds.
        """
        if self._last is not None:
            return self._last
        states = [scheme.state_dict(shared=True, can_communicate=together) for scheme in self._schemes]
        for scheme, state in zip(self._schemes, states, strict=True):
            if "outer" in state:
                held, node = state["outer"]["state"], scheme.topology.intra
                whole = self._replicas.whole_state(scheme.optimizer, scheme.replica, held, node)
                state["outer"] = {**state["outer"], "state": whole}
        return states

    def keep_last(self) -> None:
        """Store the state at the end of the run, so that saving it needs no other rank. Collective."""
        self._last = self.state()

    def forget_last(self) -> None:
        self._last = None

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore :meth:`state`; all ranks continue from the parameters that the module holds. Collective."""
        if len(states) != len(self._schemes):
            raise ValueError(
                f"the checkpoint holds {len(states)} schemes, but this run has {len(self._schemes)} optimizers"
            )
        for scheme, state in zip(self._schemes, states, strict=True):
            outer = state.get("outer")
            if outer is not None:
                outer = {**outer, "state": self._replicas.held_state(scheme.optimizer, outer["state"])}
                state = {**state, "outer": outer}
            scheme.load_state_dict(_state_for(scheme, state))

    def trained(self) -> list[str]:
        """Return the names of the parameters that the schemes train at the moment."""
        known = {id(tensor) for scheme in self._schemes for tensor in scheme.replica.parameters}
        return [
            name
            for name, parameter in self._replicas.module.named_parameters()
            if id(local(parameter)) in known or (parameter.requires_grad and not local(parameter).numel())
        ]

    @contextmanager
    def training(self, names: Collection[str] | None) -> Iterator[None]:
        """Inside, the schemes hold the parameters that were :meth:`trained` when a checkpoint was saved.

        Their saved state belongs to these parameters. A resumed program may freeze or unfreeze others, which the next
        step detects.
        """
        parameters, own = dict(self._replicas.module.named_parameters()), self._replicas.not_averaged
        before = {name: parameter.requires_grad for name, parameter in parameters.items()}
        if names is not None:
            for name, parameter in parameters.items():
                if before[name] != (name in names) and name not in own:
                    parameter.requires_grad_(name in names)
            for scheme in self._schemes:
                if self._replicas.has_changed(scheme.replica, scheme.optimizer):
                    scheme.follow(self._replicas.of(scheme.optimizer))
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                if parameter.requires_grad != before[name]:
                    parameter.requires_grad_(before[name])


def _state_for(scheme: RunningScheme[Scheme], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved state, or only its counted steps, with a warning, if another scheme saved it."""
    name = type(scheme.config).__name__
    if saved["scheme"] == name:
        return saved
    if scheme.topology.rank == 0:
        warnings.warn(
            f"the checkpoint was saved with {saved['scheme']}: {name} continues from its parameters and its number of"
            " steps, and starts a schedule of its own",
            stacklevel=2,
        )
    return {**scheme.state_dict(shared=True), **{counter: saved[counter] for counter in _COUNTERS}}

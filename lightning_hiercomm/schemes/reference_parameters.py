"""Reference parameters: the values that nodes last synchronized, and the outer optimizer that steps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes.components.merges import Merge
from lightning_hiercomm.schemes.reducers.base import Reducer


class ReferenceParameters:
    """The reference parameters of one replica; each rank stores a shard of them in its reducer.

    A reducer has reference parameters if differences from them are sent. If the merge :attr:`~Merge.keeps_reference`,
    they are also state of the scheme, from which runs resume.

    Args:
        merge: Updates them.
        is_common: Whether they are equal on all nodes, because all nodes take part in every exchange.
        is_alone: Whether there is no other replica.
        may_be_copied: Whether a joining node begins with a copy of another node's parameters.

    Attributes:
        outer: The outer optimizer, if the merge has one and there are other replicas.
    """

    def __init__(self, merge: Merge, is_common: bool, is_alone: bool, may_be_copied: bool) -> None:
        self.merge = merge
        self.outer: Any | None = None
        self._is_common = is_common
        self._may_be_copied = may_be_copied
        self.is_alone = is_alone
        self._reducer: Reducer | None = None

    def update(self, index: int, reference: Tensor, difference: Tensor) -> Tensor:
        """Update a bucket's reference parameters by the outer optimizer, or by the merge; see :class:`Merge`."""
        updated: Tensor = (self.outer or self.merge).update_reference(index, reference, difference)
        return updated

    @property
    def is_copied(self) -> bool:
        """Whether a joining node also needs the reference parameters, besides another node's parameters."""
        return self._may_be_copied and bool(self._held.references)

    @property
    def _held(self) -> Reducer:
        assert self._reducer is not None, "follow() comes first"
        return self._reducer

    # ---- a run ---------------------------------------------------------------------------------------------------

    def follow(self, reducer: Reducer) -> None:
        """Use the reference parameters of another reducer, and keep the outer optimizer's state.

        Collective over the node.
        """
        self._reducer = reducer
        self.outer = self._built(self.outer)

    def restart(self) -> None:
        """Set the reference parameters to the replica's current values, and make a new outer optimizer."""
        if not self.is_alone:
            self._held.set_references()
            self.outer = self._built(None)

    def _built(self, before: Any | None) -> Any | None:
        return None if self.is_alone else self.merge.build(self._held, before)

    # ---- as values of whole tensors ------------------------------------------------------------------------------

    @torch.no_grad()
    def values(self) -> dict[int, Tensor]:
        """Return the whole reference parameters by the ``id`` of their tensor. Collective over the node."""
        values: dict[int, Tensor] = {}
        reducer = self._held
        for index, reference in enumerate(reducer.references):
            for piece, part in reducer.buckets[index].split(reducer.whole(index, reference)):
                if id(piece.tensor) not in values:
                    values[id(piece.tensor)] = torch.empty_like(piece.tensor, memory_format=torch.contiguous_format)
                values[id(piece.tensor)].view(-1)[piece.start :][: piece.length] = part
        return values

    @torch.no_grad()
    def set_values(self, values: Mapping[int, Tensor]) -> None:
        """Set the reference parameters from :meth:`values`, on any number of nodes and ranks."""
        reducer = self._held
        for index, reference in enumerate(reducer.references):
            bucket = reducer.buckets[index]
            flat = bucket.empty(reducer.holders_of(index).num_shards)
            for piece, part in bucket.split(flat):
                part.copy_(values[id(piece.tensor)].reshape(-1)[piece.start :][: piece.length])
            reference.copy_(reducer.holders_of(index).shard(flat))

    def by_tensor(self, replica: Replica) -> list[Tensor]:
        """Return :meth:`values` in the order of the replica's tensors. Collective over the node."""
        values = self.values()
        return [values[id(tensor)] for tensor in self._tensors(replica)]

    def _tensors(self, replica: Replica) -> list[Tensor]:
        buckets = self._held.buckets[: len(self._held.references)]
        held = {id(piece.tensor) for bucket in buckets for piece in bucket.slices}
        return [tensor for tensor in replica.tensors if id(tensor) in held]

    def by_parameter(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Return the outer optimizer's state of each parameter; also its ``"reference"`` value, if that is common.

        Collective over the node.
        """
        state = {"state": [{} for _ in parameters]} if self.outer is None else self.outer.state_dict(parameters)
        if self._keeps_common_values:
            values = self.values()
            for of_parameter, parameter in zip(state["state"], parameters, strict=True):
                of_parameter["reference"] = values[id(parameter)]
        return state

    @property
    def _keeps_common_values(self) -> bool:
        return self.merge.keeps_reference and self._is_common and not self.is_alone

    # ---- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the reference parameters, and of the outer optimizer's state."""
        if self.is_alone:
            return {}
        state: dict[str, Any] = {"reducer": self._held.state_dict()}
        if self.outer is not None:  # by shard, because fragments of one tensor may have taken unequal numbers of steps
            state["outer_shards"] = self.outer.shard_states()
        return state

    def load_state_dict(self, state: Mapping[str, Any], replica: Replica) -> None:
        """Restore the reference parameters from a scheme's whole state, or from its shared state."""
        if "reducer" in state:
            self._held.load_state_dict(state["reducer"])
            if self.outer is not None and "outer_shards" in state:
                self.outer.load_shard_states(state["outer_shards"])
            return
        self._held.set_references()
        self.outer = self._built(self.outer)
        if "reference" in state and self.is_copied:
            self.set_values(dict(zip(map(id, self._tensors(replica)), state["reference"], strict=True)))
        saved = [dict(own) for own in state.get("outer", {}).get("state", ())]
        values = [own.pop("reference", None) for own in saved]
        if self.outer is not None and saved:
            self.outer.load_state_dict({"state": saved}, replica.parameters)
        if self._keeps_common_values and saved and all(value is not None for value in values):
            self.set_values(dict(zip(map(id, replica.parameters), values, strict=True)))

    def undo_point(self) -> Callable[[], None]:
        """Store the reference parameters and the outer optimizer's state; return a callback that restores both."""
        reducer, saved = self._held, self._held.state_dict()
        undo_outer = None if self.outer is None else self.outer.undo_point()

        def undo() -> None:
            reducer.load_state_dict(saved)
            if undo_outer is not None:
                undo_outer()

        return undo

    def before_nodes_change(self, parameters: Sequence[Tensor]) -> Callable[[], None]:
        """Gather the reference parameters, whose shards depend on the nodes; return a function to call afterwards."""
        values = self.values() if self._held.references else None
        state = None if self.outer is None else self.outer.state_dict(parameters)

        def resume() -> None:
            if self.outer is not None and state is not None:
                self.outer.load_state_dict(state, parameters)
            if values is not None:
                self.set_values(values)

        return resume

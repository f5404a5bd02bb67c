"""Reference parameters: the values that nodes last synchronized, and the outer optimizer that steps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes.components.merges import Merge
from lightning_hiercomm.schemes.reducers.base import Reducer, UpdateReference


class ReferenceParameters:
    """The reference parameters of one replica, which lie with a reducer: each rank keeps its shard of them.

    A reducer keeps them where differences from them travel. Where the merge :attr:`~Merge.keeps_reference`, they are
    more than that: the state of the scheme, from which checkpoints resume.

    Args:
        merge: Steps them.
        is_common: Whether they are equal on all nodes: all nodes take part in every exchange.
        is_alone: Whether there is no other replica.
        may_be_copied: Whether a node that joins begins with a copy of another node's parameters.

    Attributes:
        merge: As above.
        is_alone: As above.
        outer: The outer optimizer, if the merge has one and there are other replicas.
    """

    def __init__(self, merge: Merge, is_common: bool, is_alone: bool, may_be_copied: bool) -> None:
        self.merge = merge
        self.outer: Any | None = None
        self._is_common = is_common
        self._may_be_copied = may_be_copied
        self.is_alone = is_alone
        self._reducer: Reducer | None = None

    @property
    def update(self) -> UpdateReference | None:
        """Steps the reference parameters of a bucket, where the merge keeps them."""
        if not self.merge.keeps_reference:
            return None
        # a reducer is made before the outer optimizer that steps what it holds
        return lambda *change: (self.merge if self.outer is None else self.outer).update_reference(*change)

    @property
    def is_copied(self) -> bool:
        """Whether a node that joins needs them, besides another node's parameters."""
        return self._may_be_copied and bool(self._held.references)

    @property
    def _held(self) -> Reducer:
        assert self._reducer is not None, "a reducer comes first"
        return self._reducer

    # ---- a run ---------------------------------------------------------------------------------------------------

    def follow(self, reducer: Reducer) -> None:
        """Take those of another reducer, and continue with the outer optimizer's state. Collective over the node."""
        self._reducer = reducer
        self.outer = self._built(self.outer)

    def restart(self) -> None:
        """Take the replica's present values as the reference parameters, with a new outer optimizer."""
        if not self.is_alone:
            self._held.set_references()
            self.outer = self._built(None)

    def end_round(self) -> None:
        """Count a merge of all fragments, for the outer optimizer's scheduler."""
        if self.outer is not None:
            self.outer.end_round()

    def scalars(self) -> dict[str, float]:
        """Return current values to log."""
        return self.merge.scalars(self.outer)

    def _built(self, before: Any | None) -> Any | None:
        return None if self.is_alone else self.merge.build(self._held, before)

    # ---- as values of whole tensors ------------------------------------------------------------------------------

    @torch.no_grad()
    def values(self) -> dict[int, Tensor]:
        """Return those of every tensor that is reduced, by its ``id``. Collective over the node."""
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
        """Undo :meth:`values`, on any number of nodes and ranks."""
        reducer = self._held
        for index, reference in enumerate(reducer.references):
            bucket = reducer.buckets[index]
            flat = bucket.empty(reducer.parts_of(index))
            for piece, part in bucket.split(flat):
                part.copy_(values[id(piece.tensor)].reshape(-1)[piece.start :][: piece.length])
            reference.copy_(reducer.sent_part(flat, index))

    def by_tensor(self, replica: Replica) -> list[Tensor]:
        """Return :meth:`values` of the tensors that have any, in the order of the replica. Collective over the node."""
        values = self.values()
        return [values[id(tensor)] for tensor in self._tensors(replica)]

    def _tensors(self, replica: Replica) -> list[Tensor]:
        buckets = self._held.buckets[: len(self._held.references)]
        held = {id(piece.tensor) for bucket in buckets for piece in bucket.slices}
        return [tensor for tensor in replica.tensors if id(tensor) in held]

    def by_parameter(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Return the outer optimizer's state for each parameter, and its value as ``"agreed"`` where it is common.

        Collective over the node.
        """
        state = {"state": [{} for _ in parameters]} if self.outer is None else self.outer.state_dict(parameters)
        if self._keeps_common_values:
            values = self.values()
            for of_parameter, parameter in zip(state["state"], parameters, strict=True):
                of_parameter["agreed"] = values[id(parameter)]
        return state

    def _load_by_parameter(self, saved: Mapping[str, Any], parameters: Sequence[Tensor], with_values: bool) -> None:
        if self.outer is not None:
            state = [{name: v for name, v in own.items() if name != "agreed"} for own in saved["state"]]
            self.outer.load_state_dict({**saved, "state": state}, parameters)
        if with_values and self._keeps_common_values and all("agreed" in own for own in saved["state"]):
            values = (own["agreed"] for own in saved["state"])
            self.set_values(dict(zip(map(id, parameters), values, strict=True)))

    @property
    def _keeps_common_values(self) -> bool:
        return self.merge.keeps_reference and self._is_common and not self.is_alone

    # ---- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of them, and of the outer optimizer's state."""
        if self.is_alone:
            return {}
        state: dict[str, Any] = {"reducer": self._held.state_dict()}
        if self.outer is not None:  # fragments cut tensors, so the state by tensor has one step where they differ
            state["outer_parts"] = self.outer.part_states()
        return state

    def load_state_dict(self, state: Mapping[str, Any], replica: Replica) -> None:
        """Restore them from all state, or from what all replicas share.

        Args:
            state: The scheme's.
            replica: What is synchronized.
        """
        is_complete = "reducer" in state
        if is_complete:
            self._held.load_state_dict(state["reducer"])
        else:
            self._held.set_references()
            self.outer = self._built(self.outer)
            if "last_agreed" in state and self.is_copied:
                self.set_values(dict(zip(map(id, self._tensors(replica)), state["last_agreed"], strict=True)))
        if "outer" in state:
            self._load_by_parameter(state["outer"], replica.parameters, with_values=not is_complete)
            if not is_complete:
                for _ in range(state["rounds_in_flight"]):
                    self.end_round()
        if self.outer is not None and "outer_parts" in state:
            self.outer.load_part_states(state["outer_parts"])

    def undo_point(self) -> Callable[[], None]:
        """Remember them, and the outer optimizer's state; return a callback that restores both."""
        reducer, saved = self._held, self._held.state_dict()
        undo_outer = None if self.outer is None else self.outer.undo_point()

        def undo() -> None:
            reducer.load_state_dict(saved)
            if undo_outer is not None:
                undo_outer()

        return undo

    def before_nodes_change(self, parameters: Sequence[Tensor]) -> Callable[[], None]:
        """Gather them, whose shards follow from the nodes; return what to call after the change."""
        values = self.values() if self._held.references else None
        state = None if self.outer is None else self.outer.state_dict(parameters)

        def resume() -> None:
            if self.outer is not None and state is not None:
                self.outer.load_state_dict(state, parameters)
            if values is not None:
                self.set_values(values)

        return resume

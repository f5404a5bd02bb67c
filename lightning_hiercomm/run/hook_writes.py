"""Parameters that hooks write while the module holds the averaged model, in a validation or a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_hiercomm.comm.autocast import outside_autocast
from lightning_hiercomm.comm.dtensor import local
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.averaged_model import AveragedModel
from lightning_hiercomm.run.checksums import Checksums
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.schemes import RunningScheme, Scheme

Broadcast = Callable[[Sequence[Tensor]], None]
"""Gives all ranks the first rank's values of parameters. Collective."""


class HookWrites:
    """Lets all ranks continue from what a hook has written to the averaged model, as with DDP.

    Attributes:
        has_saved_own_values: Whether ranks have stored their own parameters since the last validation began.
    """

    def __init__(
        self,
        averaged_model: AveragedModel,
        schemes: Sequence[RunningScheme[Scheme]],
        replicas: Replicas,
        topology: Topology,
        restart: Callable[[], None],
    ) -> None:
        self._averaged_model = averaged_model
        self._schemes = schemes
        self._replicas = replicas
        self._topology = topology
        self._restart = restart
        self._watched: tuple[dict[str, Tensor], Checksums] | None = None
        self._before: dict[str, Tensor] = {}  # copies of the parameters, with elastic nodes
        self.has_saved_own_values = False

    @property
    def is_validating(self) -> bool:
        """Whether a validation has begun on the averaged model."""
        return self._watched is not None

    def begin_validation(self) -> None:
        """Write the averaged parameters to the module. Collective."""
        self.has_saved_own_values = False
        self._averaged_model.enter()
        self._watch()

    def end_validation(self, broadcast: Broadcast) -> None:
        """Put this rank's own parameters back, unless a hook has written to the averaged ones. Collective."""
        names = self._leave(broadcast, "a validation hook")
        if names and self.has_saved_own_values and self._topology.rank == 0:
            warnings.warn(
                f"parameters were written in a validation hook ({names}) during which a checkpoint was saved with"
                " checkpoint_replicas=True: what each rank stored with it are its parameters of before. Save after the"
                " validation: ModelCheckpoint(save_on_train_epoch_end=True)",
                stacklevel=2,
            )

    @contextmanager
    def saving(self, broadcast: Broadcast) -> Iterator[None]:
        """Inside, a checkpoint is made of the averaged parameters, which hooks may write to. Collective."""
        self._averaged_model.enter()
        self._watch()
        try:
            yield
        except BaseException:
            self.forget()
            self._averaged_model.leave()
            raise
        self._leave(broadcast, "on_save_checkpoint")

    def forget(self) -> None:
        """Stop watching."""
        self._watched, self._before = None, {}

    @torch.no_grad()
    def _watch(self) -> None:
        self._replicas.have_written()  # or the module's parameters may be gathered ones
        named = self._replicas.module.named_parameters()
        parameters: dict[str, Tensor] = {n: p for n, p in named if n not in self._replicas.per_rank}
        self._watched = parameters, Checksums(parameters)
        if self._topology.may_grow:
            self._before = {n: local(p).detach().clone() for n, p in parameters.items()}

    @outside_autocast()
    def _leave(self, broadcast: Broadcast, hook: str) -> str:
        """Put this rank's own values back; return the names of trained parameters that keep what was written."""
        if self._topology.may_grow:
            self._undo(hook)
            self._averaged_model.leave()
            return ""
        written, names = self._written(), ""
        if self._are_trained(written.values()):
            names = _listed(written)
            with torch.inference_mode(False):  # training writes to tensors that schemes create now
                self._keep(written, broadcast, hook)
        self.forget()
        self._averaged_model.leave(kept=[*written.values()])
        return names

    @torch.no_grad()
    def _written(self) -> dict[str, Tensor]:
        """Return the parameters, by name, that any rank has written to. Collective."""
        parameters, changed = self._changed()
        self._averaged_model.barrier()  # or this could match a collective that a hook calls on some ranks only
        flags = torch.tensor([int(name in changed) for name in parameters], device=self._replicas.device)
        if parameters:
            self._topology.world.all_reduce(flags, op="max").wait()
        return {name: parameters[name] for name, flag in zip(parameters, flags.tolist(), strict=True) if flag}

    def _changed(self) -> tuple[dict[str, Tensor], list[str]]:
        """Return all watched parameters, and the names of those that this rank has written to."""
        assert self._watched is not None
        parameters, checksums = self._watched
        self._replicas.have_written()
        return parameters, Checksums(parameters).changed_since(checksums)

    @torch.no_grad()
    def _undo(self, hook: str) -> None:
        """Restore the averaged values of elastic nodes: other nodes would not receive what was written."""
        parameters, changed = self._changed()
        for name in changed:
            local(parameters[name]).copy_(self._before[name])
        self.forget()
        if changed and self._topology.local_rank == 0:
            warnings.warn(
                f"elastic nodes: what was written to parameters in {hook} ({_listed(changed)}) is undone, because"
                " other nodes do not receive it. Write them in a training hook, on all nodes",
                stacklevel=2,
            )

    def _are_trained(self, written: Collection[Tensor]) -> bool:
        trained = {id(parameter) for scheme in self._schemes for parameter in scheme.replica.with_empty}
        return any(id(local(parameter)) in trained for parameter in written)

    def _keep(self, written: Mapping[str, Tensor], broadcast: Broadcast, hook: str) -> None:
        before = Checksums(written)
        broadcast([*written.values()])
        self._replicas.have_written()
        changes = bool(Checksums(written).changed_since(before))
        differs = torch.tensor([int(changes)], device=self._replicas.device)
        self._topology.world.all_reduce(differs, op="max").wait()
        if bool(differs) and self._topology.rank == 0:
            warnings.warn(
                f"ranks wrote different values to parameters in {hook} ({_listed(written)}). All ranks continue"
                " with those of rank 0: write the same values on all ranks",
                stacklevel=2,
            )
        self._averaged_model.drop_own()
        self._restart()


def _listed(names: Collection[str]) -> str:
    return ", ".join([*names][:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

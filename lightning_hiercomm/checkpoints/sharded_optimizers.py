"""Loads states of optimizers with sharded parameters, from files with whole states and from directories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.optim import Optimizer

from lightning_hiercomm.schemes.optimizer_state import evaluates_loss, is_placeholder


def numbered_by_optimizer(
    state: Mapping[str, Any], optimizer: Optimizer, parameters: Iterable[nn.Parameter]
) -> dict[str, Any]:
    """Renumber a whole state as ``Optimizer.state_dict`` does; Lightning numbers the module's parameters instead."""
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    groups: list[dict[str, Any]] = []
    number: dict[int, int] = {}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        first = len(number)
        number |= {place[id(parameter)]: first + index for index, parameter in enumerate(group["params"])}
        groups.append({**saved, "params": list(range(first, len(number)))})
    return {"state": {number[key]: value for key, value in state["state"].items()}, "param_groups": groups}


def load_optimizers(
    path: Path, states: Sequence[Mapping[str, Any]], module: nn.Module, optimizers: Sequence[Optimizer], strict: bool
) -> None:
    """Load optimizer states from a file or a directory. Collective.

    Args:
        path: Of the file or directory.
        states: Those in the file.
        module: Sharded; the same parameters require gradients as in the saved run.
        optimizers: In their order.
        strict: Whether every parameter must have a state.

    Raises:
        ValueError: If a file has states of another number of optimizers, or torch cannot load one.
    """
    for optimizer in optimizers:
        if evaluates_loss(optimizer):  # torch calls step() without a closure to create its state
            raise ValueError(
                f"the state of {type(optimizer).__name__} in {path} cannot be resumed where parameters are sharded:"
                " restart from its weights (the state_dict in it), or train with HierarchicalStrategy"
            )
    if path.is_dir():
        for index, optimizer in enumerate(optimizers):
            if is_placeholder(optimizer):
                continue
            held = {f"optimizer_{index}": get_optimizer_state_dict(module, optimizer)}
            load(held, checkpoint_id=path)
            set_optimizer_state_dict(
                module,
                optimizer,
                optim_state_dict=held[f"optimizer_{index}"],
                options=StateDictOptions(cpu_offload=True, strict=strict),
            )
        return
    if len(states) != len(optimizers):
        raise ValueError(
            f"the checkpoint {path} holds the states of {len(states)} optimizers, but this run has {len(optimizers)}:"
            " resume from one that was saved with save_weights_only=False, by a run with as many"
        )
    options = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True, strict=strict)
    for optimizer, state in zip(optimizers, states, strict=True):
        if state.get("state"):
            set_optimizer_state_dict(
                module, optimizer, optim_state_dict=_named(state, optimizer, module), options=options
            )
        else:  # torch does not load param groups without state, for instance of SGD without momentum
            optimizer.load_state_dict(dict(state))


def _named(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return a whole state keyed by parameter names, as torch loads it."""
    parameters = list(module.parameters())
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if numbers == list(range(len(own))) and _fits(state, own):
        place = {id(parameter): index for index, parameter in enumerate(parameters)}
        state = {
            "state": {place[id(own[number])]: value for number, value in state["state"].items()},
            "param_groups": [
                {**saved, "params": [place[id(parameter)] for parameter in group["params"]]}
                for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)
            ],
        }
    named: dict[str, Any] = FullyShardedDataParallel.rekey_optim_state_dict(
        dict(state), OptimStateKeyType.PARAM_NAME, module
    )
    return named


def _fits(state: Mapping[str, Any], parameters: Sequence[Tensor]) -> bool:
    """Whether the state of each parameter has its shape, or is a scalar."""
    return all(
        value.shape in (parameters[number].shape, ())
        for number, held in state["state"].items()
        for value in held.values()
        if isinstance(value, Tensor)
    )

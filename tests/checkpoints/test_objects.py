"""Every rank gets back the state of its own callbacks, hooks and loaders, of all types that Lightning restores."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from fits import fit_here
from lightning.pytorch.plugins import Precision
from problems import Oracle, SaveAfter, one_trainer
from torch.utils.data import DataLoader

from lightning_hiercomm import HierarchicalStrategy, PeriodicAveraging
from lightning_hiercomm._lightning.saves import with_plain_numbers

pytestmark = pytest.mark.pooled
STEPS = 3


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


def safe_state(rank: int) -> dict[str, Any]:
    return {
        "set": {rank, "a"},
        "counter": Counter({"seen": rank}),
        "complex": complex(rank, 1),
        "size": torch.Size([rank]),
        "dtype": [torch.float16, torch.float32][rank],
        "tuple": (rank, {"nested": {rank}}),
        "ordered": OrderedDict(a=rank, b=[{rank}]),
        "list": [rank, None, "text", [{"deep": Counter([rank])}]],
    }


def unsafe_state(rank: int) -> dict[str, Any]:
    return {
        "number": numpy.float64(10 + rank),
        "integer": numpy.int64(10 + rank),
        "history": [numpy.float32(rank), numpy.float32(2.5)],
        "array": numpy.arange(3.0) + rank,
        "path": Path(f"/data/{rank}"),
        "custom": Custom(rank),
    }


def equal(one: Any, other: Any) -> bool:
    """Whether two values are equal, and of the same type, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return numpy.array_equal(one, other) if isinstance(one, numpy.ndarray) else bool(one == other)


class Remembers(pl.Callback):
    """Saves ``state`` in ``state_dict`` and in ``on_save_checkpoint``, and keeps what it gets back."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.restored: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored["callback"] = state_dict

    def on_save_checkpoint(self, trainer, pl_module, checkpoint) -> None:
        checkpoint["of_callback"] = self.state

    def on_load_checkpoint(self, trainer, pl_module, checkpoint) -> None:
        self.restored["hook"] = checkpoint["of_callback"]


class Loader(DataLoader):
    """Stateful, with a set in its state."""

    def __init__(self, rank: int) -> None:
        super().__init__(torch.arange(float(STEPS)).unsqueeze(1))
        self.rank = rank
        self.restored: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"shard": self.rank, "seen": {self.rank}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict


class Data(pl.LightningDataModule):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.restored: Any = None

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict

    def train_dataloader(self) -> DataLoader:
        self.loader = Loader(self.trainer.global_rank)
        return self.loader


class Plugin(Precision):
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {} if self.value is None else {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


class Net(Oracle):
    """Saves ``state`` in its hook, as a layer's extra state, and in a param group of its optimizer."""

    def __init__(self, state: Any = None) -> None:
        super().__init__(STEPS)
        self.state = state
        self.restored: dict[str, Any] = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["of_module"] = self.state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.restored["hook"] = checkpoint["of_module"]

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.restored["extra"] = state

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.param_groups[0]["note"] = self.state
        return optimizer


def saves_unless(resume: bool, path: Path) -> list[pl.Callback]:
    return [] if resume else [SaveAfter(STEPS, path)]


def fitted(path: Path, state: Any, resume: bool = False, **fit_arguments: Any) -> dict[str, Any]:
    """Save in all places, or resume; what this rank has got back from them."""
    strategy = HierarchicalStrategy(PeriodicAveraging(2), ranks_per_node=1, checkpoint_replicas=True)
    callback, data, module, plugin = Remembers(state), Data(state), Net(state), Plugin(None if resume else state)
    arguments = {"max_epochs": 1 + resume, "callbacks": [callback, *saves_unless(resume, path)], "plugins": [plugin]}
    trainer = one_trainer(path.parent, devices=2, strategy=strategy, use_distributed_sampler=False, **arguments)
    trainer.fit(module, data, ckpt_path=path if resume else None, **fit_arguments)
    (group,) = trainer.optimizers[0].param_groups
    return {
        "callback": callback.restored.get("callback"),
        "callback's hook": callback.restored.get("hook"),
        "module's hook": module.restored.get("hook"),
        "extra state": module.restored.get("extra"),
        "data": data.restored,
        "loader": data.loader.restored,
        "param group": group["note"],
        "precision": plugin.value,
    }


def lost(folder: Path, state_of: Any, **fit_arguments: Any) -> list[str]:
    """Names of what did not come back as this rank's own."""
    path, rank = folder / "saved.ckpt", int(os.environ["LOCAL_RANK"])
    fitted(path, state_of(rank))
    restored = fitted(path, None, resume=True, **fit_arguments)
    expected = dict.fromkeys(restored, state_of(rank))
    expected["loader"] = {"shard": rank, "seen": {rank}}
    expected["param group"] = with_plain_numbers(state_of(rank))
    return [name for name, value in restored.items() if not equal(value, expected[name])]


@pytest.mark.parametrize(("state", "weights_only"), [(safe_state, True), (unsafe_state, False)])
def test_state_of_all_types_is_restored_per_rank(borrow, state, weights_only):
    assert borrow(lambda folder: lost(folder, state, weights_only=weights_only), ranks=2) == [[], []]


def test_state_that_cannot_be_pickled_ends_the_save_on_all_ranks_by_name(borrow):
    def main(folder):
        rank = int(os.environ["LOCAL_RANK"])
        with pytest.raises(OSError, match=r"rank 1 could not write its sidecar: .*lock"):
            fitted(folder / "saved.ckpt", {"lock": threading.Lock() if rank == 1 else None})
        return rank or [*folder.glob("saved*")]  # rank 0 deletes what others have written

    assert borrow(main, ranks=2) == [[], 1]


class RankZeroOnly(pl.Callback):
    """Saves in its hook on rank 0 only, and has state on one rank."""

    def __init__(self, rank: int, with_state: int) -> None:
        self.rank, self.with_state = rank, with_state
        self.restored: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.rank} if self.rank == self.with_state else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored.append(state_dict)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint) -> None:
        if trainer.is_global_zero:
            checkpoint["of_rank_zero"] = "all"

    def on_load_checkpoint(self, trainer, pl_module, checkpoint) -> None:
        self.restored.append(checkpoint["of_rank_zero"])


@pytest.mark.parametrize("with_state", [0, 1])
def test_a_save_on_rank_0_in_a_hook_includes_all_ranks(borrow, with_state):
    def main(folder):
        rank, path = int(os.environ["LOCAL_RANK"]), folder / "saved.ckpt"
        for resume in (False, True):
            callback = RankZeroOnly(rank, with_state)
            arguments = {"max_epochs": 1 + resume, "callbacks": [callback, *saves_unless(resume, path)]}
            where, arguments["checkpoint_replicas"] = path if resume else None, True
            fit_here(folder, Oracle(STEPS), PeriodicAveraging(2), where, **arguments)
        return callback.restored

    expected = [["all"], ["all"]]
    expected[with_state].append({"own": with_state})
    assert borrow(main, ranks=2) == expected

"""A node of an elastic run: trains a small model, and writes down where it ended.

`python elastic.py SETTINGS`: JSON, see `Node`. With `fault`, the node fails once, at a moment of its n-th
synchronization.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import json
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from elastic_fault import Fault
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiercomm import (
    DASO,
    CommunicationMonitor,
    DiLoCo,
    Elastic,
    Epochs,
    HierarchicalStrategy,
    PeriodicAveraging,
)
from lightning_hiercomm._lightning.state_transfer import state_of
from lightning_hiercomm.checkpoints.sidecar import random_state
from lightning_hiercomm.elastic import lighthouse, membership, rendezvous
from lightning_hiercomm.schemes import OuterOptimizer, ParameterSync, RandomPermutation, Scheme

SCHEMES: dict[str, Callable[[int], Scheme]] = {
    "periodic": PeriodicAveraging,
    "diloco": DiLoCo,
    "fragments": partial(DiLoCo, fragments=2),
    "noloco": partial(ParameterSync, reducer=RandomPermutation(), merge=OuterOptimizer()),
    "daso": partial(DASO, staleness=0, warmup=Epochs(1), cooldown=Epochs(1), reducer="sharded"),
}


@dataclass
class Node:
    """What a node does.

    Attributes:
        folder: Where it writes.
        scheme: By name.
        every: Optimizer steps between synchronizations.
        ranks: Of the node.
        epochs: Of the run.
        batches: Of an epoch.
        pause: Seconds that a step takes.
        fault: `"kill:moment:count"`, `"stop:..."`, or `"slow:..."`, which takes three seconds; `"close:..."` and
            `"mute:..."` let rank 1 of the node alone close its group, or send nothing; none if empty.
        hold: By optimizer steps, a life of a node, such as `1.2` for the third one of node 1, that it waits for: until
            that asks, and then it takes its time until that trains, so that no test depends on the machine's speed.
            With `1.2.heard`, until the lighthouse has surely heard it. At step 1, until that node's first life asks.
        elastic: Arguments of `Elastic`; none: the node is one of a run whose nodes stay.
        settings: Further arguments of the strategy.
        checkpoints: The folder for them; none if empty.
        resume: From the last one.
        validates: After each epoch.
        notes_samples: Write down which samples it has seen.
        notes_states: Write down, as digests, what it gives to joining nodes, and what it has when it begins to train.
        estimates: Let the schedule be as long as Lightning estimates the run.
        accelerator: ``"cpu"``, or ``"gpu"`` for nodes of one rank.
        bank: Fill a buffer whose length is another one on every node and after every step.
        writes: Write to the parameters in every validation.
        remembers: Train with a loader that remembers its place.
    """

    folder: str
    scheme: str = "periodic"
    every: int = 4
    ranks: int = 1
    epochs: int = 3
    batches: int = 10
    pause: float = 0.0
    fault: str = ""
    hold: dict[str, str] = field(default_factory=dict)
    elastic: dict[str, Any] | None = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    checkpoints: str = ""
    resume: bool = False
    validates: bool = False
    notes_samples: bool = False
    notes_states: bool = False
    estimates: bool = False
    accelerator: str = "cpu"
    bank: bool = False
    writes: bool = False
    remembers: bool = False


class Remembering(DataLoader):
    """Counts its batches, and continues after as many, as torchdata's StatefulDataLoader does."""

    taken = 0

    def __iter__(self) -> Any:
        batches, done = super().__iter__(), self.taken
        self.taken = 0
        for number, batch in enumerate(batches):
            self.taken = number + 1
            if number >= done:
                yield batch
        self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class Net(pl.LightningModule):
    def __init__(self, node: Node, path: Path) -> None:
        super().__init__()
        self.node, self.path = node, path
        torch.manual_seed(sum(map(ord, path.stem)))  # nodes begin unequal on purpose
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
        )
        if node.bank:
            self.register_buffer("bank", torch.zeros(4))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        time.sleep(self.node.pause)
        x, y, samples = batch
        if self.node.bank:
            self.bank = torch.ones(3 + self.global_step + 5 * int(os.environ["HIERCOMM_NODE"]))
        if self.node.notes_samples:
            with self.path.with_name(f"{self.path.name}.samples.{self.global_rank}").open("a") as file:
                file.write(f"{self.current_epoch} {samples.tolist()}\n")
        if len(x) == 1:  # of so many nodes the share of one may end with a single sample, which has no variance
            x, y = x.repeat(2, 1), y.repeat(2)
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y, _ = batch
        self.log("val", torch.nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def on_validation_end(self) -> None:
        if self.node.writes:
            self.net[0].weight.data.add_(1.0)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        steps = self.trainer.estimated_stepping_batches if self.node.estimates else 1000
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def data(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(size, 8, generator=generator)
    return TensorDataset(x, (x[:, :4] + 0.1 * x[:, 4:]).argmax(1), torch.arange(size))


@torch.no_grad()
def loss_of(model: Net) -> float:
    x, y = (tensor.to(model.device) for tensor in data(4096).tensors[:2])
    return torch.nn.functional.cross_entropy(model.net.eval()(x), y).item()


def go_to_namespace(name: str) -> None:
    """Into the network namespace with that name; threads that are started later are in it, too."""
    with open(f"/var/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot go to namespace {name}")


def incarnation() -> str:
    """The number of this node's life."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def note_asking(path: Path) -> None:
    """Leave a file when this life of the node looks for the others, and one when the lighthouse has heard it."""
    ask, ask_lighthouse = rendezvous.Rendezvous._answer, lighthouse.TorchftLighthouse.ask

    def tells(own: Any, *args: Any) -> Any:
        answer = ask_lighthouse(own, *args)  # or has waited for one, for a second
        path.with_suffix(".heard").touch()
        return answer

    lighthouse.TorchftLighthouse.ask = tells

    def asks(own: Any, *args: Any) -> Any:
        if not path.exists():
            path.touch()
        return ask(own, *args)

    rendezvous.Rendezvous._answer = asks


def note_given(path: Path) -> None:
    """Write down, by its step, each state that this node gives to a joining node."""
    give_state = membership.Membership.give_state

    def gives(own: Any, state: Any) -> None:
        def noted() -> Any:
            whole = state()
            if whole is not None and own.around.is_first:
                step = whole["checkpoint"]["global_step"]
                path.with_name(f"{path.name}.{step}.gave").write_text(written(whole))
            return whole

        give_state(own, noted)

    membership.Membership.give_state = gives


def own_state(trainer: pl.Trainer, moment: str) -> dict[str, Any]:
    """What this node would give, made here in the same words. Collective over it."""
    strategy = trainer.strategy
    with strategy._run.averaged_model.own_as_averaged():
        whole = state_of(trainer, moment)
    strategy._checkpoints.add_to(whole["checkpoint"], strategy._run, None, together=False, is_own=True)
    if moment == "batch":  # or loaders have drawn since
        whole["random"] = random_state()
    return whole


def written(value: Any) -> str:
    """A state as text that is equal where all bits are."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            bits = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return [str(value.dtype), [*value.shape], hashlib.sha256(bits).hexdigest()[:16]]
        if isinstance(value, Mapping):
            return {str(key): plain(each) for key, each in value.items()}
        return [*map(plain, value)] if isinstance(value, list | tuple) else value

    return json.dumps(plain(value), sort_keys=True, default=repr)


class Looks(pl.Callback):
    """Notes where the node is, for programs that watch the run, and where it has ended."""

    def __init__(self, path: Path, hold: dict[str, str], notes_state: bool = False) -> None:
        later = [who.partition(".")[0] for who in hold.values() if not who.endswith((".0", ".heard"))]
        # who comes when the others are held already lives no second time: nothing befalls it
        first = [(1, f"{node}.0") for node in later]
        self.path, self.hold = path, [*first, *((int(step), who) for step, who in hold.items())]
        self.notes_state = notes_state

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if not self.notes_state:
            return
        self.notes_state = False
        state = written(own_state(trainer, "batch" if index else "epoch"))
        if trainer.is_global_zero:
            self.path.with_name(f"{self.path.name}.{incarnation()}.{trainer.global_step}.has").write_text(state)

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.path.with_name(f"{self.path.name}.{incarnation()}.began").touch()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.is_global_zero:
            with self.path.with_suffix(".steps").open("a") as file:
                file.write(f"{time.time():.3f} {trainer.global_step}\n")
        self.path.with_name(f"{self.path.name}.{incarnation()}.trains").touch()
        for step, who in self.hold:
            until = time.monotonic() + 0.5
            file = who if who.endswith(".heard") else f"{who}.asks"
            asks, trains = self.path.with_name(file), self.path.with_name(f"{who}.trains")
            while trainer.global_step == step and not asks.exists():
                time.sleep(0.01)
            while trainer.global_step > step and not trains.exists() and time.monotonic() < until:
                time.sleep(0.01)
        end = self.path.with_name("end")
        if end.exists() and trainer.global_step == int(end.read_text()):
            trainer.should_stop = True

    def on_fit_end(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        strategy = trainer.strategy
        floats = {
            name: value for name, value in model.state_dict().items() if value.is_floating_point() and name != "bank"
        }
        values = b"".join(value.cpu().numpy().tobytes() for _, value in sorted(floats.items()))
        progress = trainer.fit_loop.epoch_loop.batch_progress
        state = strategy.schemes[0].state
        said = {
            "parameters": hashlib.sha256(values).hexdigest()[:16],
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "scheme": [state.steps, state.synchronizations, state.epoch, state.step_in_epoch],
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "batches": [progress.total.ready, progress.total.completed],
            "logger_step": trainer.fit_loop.epoch_loop._batches_that_stepped,
            "val": float(trainer.callback_metrics.get("val", 0.0)),
            "loss": loss_of(model),
            "communication": strategy.communication(),
        }
        self.path.with_suffix(".json").write_text(json.dumps(said))


def main(node: Node) -> None:
    faulthandler.register(signal.SIGQUIT, all_threads=True)  # shows where a node is
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if os.environ.get("NAMESPACE"):
        go_to_namespace(os.environ["NAMESPACE"])
    name, folder = os.environ.get("HIERCOMM_NODE", "0"), Path(node.folder)
    note_asking(folder / f"{name}.{incarnation()}.asks")
    if node.notes_states:
        note_given(folder / f"{name}.{incarnation()}")
    if node.fault:
        Fault(node.fault, folder, name).install()
    scheme = SCHEMES[node.scheme](node.every)
    elastic = None if node.elastic is None else Elastic(**node.elastic)
    strategy = HierarchicalStrategy(
        scheme, elastic=elastic, start_method="fork" if node.ranks > 1 else "popen", **node.settings
    )
    looks = Looks(folder / name, node.hold, node.notes_states)
    callbacks: list[Any] = [looks, CommunicationMonitor()]
    if node.checkpoints:
        callbacks.append(ModelCheckpoint(node.checkpoints, save_last=True, every_n_train_steps=node.every))
    trainer = pl.Trainer(
        max_epochs=node.epochs,
        limit_train_batches=node.batches,
        accelerator=node.accelerator,
        devices=node.ranks,
        strategy=strategy,
        callbacks=callbacks,
        logger=False,
        default_root_dir=node.folder,
        enable_checkpointing=bool(node.checkpoints),
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=1.0 if node.validates else 0,
        num_sanity_val_steps=0,
    )
    loaders = [(Remembering if node.remembers else DataLoader)(data(4096), batch_size=8, shuffle=True)]
    if node.validates:
        loaders.append(DataLoader(data(16), batch_size=8))
    trainer.fit(Net(node, folder / f"{name}.{incarnation()}"), *loaders, ckpt_path="last" if node.resume else None)


if __name__ == "__main__":
    main(Node(**json.loads(sys.argv[1])))

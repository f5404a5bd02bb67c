"""Lightning's own: DDPStrategy, its post-local SGD, and its loop without any communication."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks.contenders.plain import node_group
from benchmarks.job import Recorder
from benchmarks.workloads import Batch, judged
from lightning_hiercomm import Topology


def train(recorder: Recorder, options: dict[str, Any]) -> None:
    """``kind``: "ddp", "ddp_bf16_hook", "post_local", "post_local_hook" or "single"."""
    kind = options["kind"]
    if kind == "single":
        with mock.patch.dict(os.environ):
            for name in [name for name in os.environ if name.startswith("TORCHELASTIC_") or name in _TORCHRUN]:
                del os.environ[name]
            fit(recorder, SingleDeviceStrategy(device="cpu"), devices=1, num_nodes=1)
    elif kind == "ddp":
        fit(recorder, DDPStrategy())
    elif kind == "ddp_bf16_hook":
        fit(recorder, HookedDDPStrategy(ddp_comm_hook=bf16_compress_hook))
    else:
        state = PostLocalSGDState(process_group=None, subgroup=node_group(recorder.world), start_localSGD_iter=0)
        strategy = HookedDDPStrategy if kind == "post_local_hook" else DDPStrategy
        arguments: dict[str, Any] = {"ddp_comm_state": state, "ddp_comm_hook": post_localSGD_hook}
        fit(recorder, strategy(**arguments, model_averaging_period=options["sync_every"]))


class HookedDDPStrategy(DDPStrategy):
    """DDPStrategy that registers its communication hook on CPU too, where Lightning drops it in silence."""

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, nn.parallel.DistributedDataParallel)
        _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)


def fit(recorder: Recorder, strategy: Strategy, **trainer_arguments: Any) -> L.Trainer:
    """Train the recorder's workload with a strategy."""
    job, world = recorder.job, recorder.world
    module = Module(recorder)
    trainer = L.Trainer(
        **{"accelerator": "cpu"} if job.device == "cpu" else {"accelerator": "gpu", "precision": "bf16-mixed"},
        strategy=strategy,
        **{"devices": world.local_size, "num_nodes": world.nodes, **trainer_arguments},
        max_epochs=1,
        limit_train_batches=job.total_steps,
        limit_val_batches=1 if job.evaluate_every else 0,
        val_check_interval=job.evaluate_every or None,
        num_sanity_val_steps=0,
        callbacks=[StepTimes(recorder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    held_out = DataLoader(HeldOut(recorder.held_out), batch_size=None) if job.evaluate_every else None
    trainer.fit(module, DataLoader(Batches(recorder), batch_size=None), held_out)
    if dist.is_initialized():
        recorder.finish(module.model)
    if isinstance(topology := getattr(strategy, "topology", None), Topology):
        recorder.record.messages = topology.meter.snapshot()["inter_messages"] / job.total_steps
    return trainer


class Module(L.LightningModule):
    """The workload as a LightningModule."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.model = recorder.model()
        self.judged = (0.0, 0.0)  # accuracy and loss

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.model(inputs)
        return output

    def training_step(self, batch: Batch, _: int) -> Tensor:
        return self._recorder.loss(self.model, batch)

    def validation_step(self, batch: Batch, _: int) -> None:
        self.judged = judged(self.model, batch)

    def configure_optimizers(self) -> Optimizer:
        return self._recorder.optimizer(self.model)


class StepTimes(Callback):
    """Tells the recorder of steps and evaluations."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._judged = (0.0, 0.0)

    def on_train_batch_end(self, *_: Any) -> None:
        self._recorder.step_done()
        if self._recorder.evaluation_due():  # validation comes next
            self._recorder.begin_evaluation()

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, Module)
        self._judged = module.judged

    def on_train_batch_start(self, *_: Any) -> None:
        if self._recorder.evaluating:
            self._recorder.end_evaluation(*self._judged)


class HeldOut(Dataset[Batch]):
    """One batch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Batch:
        return self._batch


class Batches(IterableDataset[Batch]):
    """The recorder's endless batches."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __iter__(self) -> Any:
        while True:
            yield self._recorder.next_batch()


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

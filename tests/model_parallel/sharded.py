"""Modules that shard themselves, and their like that do not."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

BATCH, STEPS = 8, 6
"""Samples per step over all ranks, steps per epoch."""


class Net(pl.LightningModule):
    """A network whose layers do not all split evenly over two ranks; its ``report`` is what each step left."""

    foreach: bool | None = None

    def __init__(self, optimizer: str = "sgd", replicas: int = 4) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.replicas = replicas
        self.net: Any = None
        self.report: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.build()
            if isinstance(self.trainer.strategy, ModelParallelStrategy):
                self.shard()

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 1))

    def shard(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.net[2], mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.report.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=self.foreach)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, foreach=self.foreach)

    def loader(self, seed: int, steps: int) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(steps * BATCH, 6, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=BATCH // self.replicas)

    def train_dataloader(self) -> DataLoader:
        return self.loader(1, STEPS)

    def val_dataloader(self) -> DataLoader:
        return self.loader(2, 2)


class Searching(Net):
    """How often LBFGS evaluates the loss depends on the loss. Its layers split evenly: torch flattens no others."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 2))

    def loss(self, batch: Any) -> Tensor:
        return super().loss([batch[0], batch[1].expand(-1, 2)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        del self.report[self.trainer.global_step + 1 :]  # of evaluations in a step, the first
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3, line_search_fn="strong_wolfe")


class Unfreezing(Net):
    """Trains its last layer later; of that, one row over two ranks, the second has nothing."""

    def build(self) -> nn.Module:
        net = super().build()
        net[-1].requires_grad_(False)
        return net

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[-1].requires_grad_(self.trainer.global_step >= 4)


class Dropped(Net):
    """Dropout from every rank's own random stream, statistics that differ, samples that follow from rank and step."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * self.trainer.global_step + self.global_rank)
        x = torch.randn(4, 6, generator=generator)
        return super().training_step((x, x.sum(1, keepdim=True).sin()), batch_idx)


class Meta(Net):
    """Made without memory, and given values by every rank on its own."""

    def build(self) -> nn.Module:
        with torch.device("meta"):
            return super().build()

    def shard(self) -> None:
        super().shard()
        assert all(parameter.is_meta for parameter in self.parameters())
        torch.manual_seed(self.global_rank)


class FeedForward(nn.Module):
    """The block of Lightning's own example of tensor parallelism; its first layer may be a special one."""

    def __init__(self, width: int = 6, hidden: int = 16, outputs: int = 1, first: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.w1 = first(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, outputs, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Watching(nn.Linear):
    """Keeps statistics of its input, written to and assigned again; torch makes DTensors of a parallel layer's."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_buffer("written", torch.ones(()))
        self.register_buffer("assigned", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            size = x.detach().abs().mean()
            self.written.mul_(0.5).add_(size)
            self.assigned = 0.5 * self.assigned + size
        return super().forward(x)


class TensorParallel(Net):
    """Parallelised as Lightning's examples do it: tensor parallel, then FSDP2, whichever has ranks."""

    foreach = False  # torch's fused steps do not mix DTensors with the plain parameters of the norm

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return FeedForward(first=Watching)

    def shard(self) -> None:
        tp_mesh = self.device_mesh["tensor_parallel"]
        if tp_mesh.size() > 1:
            plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
            parallelize_module(self.net, tp_mesh, plan)
        dp_mesh = self.device_mesh["data_parallel"]
        if dp_mesh.size() > 1:
            fully_shard(self.net, mesh=dp_mesh)


class Resumable(TensorParallel):
    """Its samples follow from the step, and from whose they are."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        whose = self.trainer.strategy.distributed_sampler_kwargs["rank"]
        generator = torch.Generator().manual_seed(10 * self.trainer.global_step + whose)
        x = torch.randn(2, 6, generator=generator)
        return super().training_step((x, x.sum(1, keepdim=True).sin()), batch_idx)


class Decoder(nn.Module):
    """Embedding, a block with a residual, norm and head: what Lightning's own example makes of a language model."""

    def __init__(self, vocabulary: int = 16, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.block = FeedForward(width, outputs=width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("rotation", self.rotations(width))

    @staticmethod
    def rotations(width: int) -> Tensor:
        return torch.polar(torch.ones(width // 2), torch.arange(width // 2).float())

    def reset_parameters(self) -> None:
        with torch.device(self.rotation.device):
            self.rotation = self.rotations(2 * len(self.rotation))

    def draw(self) -> None:
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.block(x)
        return self.head(self.norm(x)).float()


class LanguageModel(pl.LightningModule):
    """As Lightning's example of tensor parallelism: made under ``init_module(empty_init=True)``; sequence parallel and
    loss parallel; blocks whose activations are computed again, in mixed precision; values that come when training
    starts, on every rank from its own random stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        self.first: list[Tensor] = []
        self.report: list[float] = []

    def configure_model(self) -> None:
        tp_mesh, dp_mesh = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        whole, part = Replicate(), Shard(1)
        plan = {
            "embedding": RowwiseParallel(input_layouts=whole, output_layouts=part),
            "block.norm": SequenceParallel(),
            "block.w1": ColwiseParallel(input_layouts=part),
            "block.w3": ColwiseParallel(input_layouts=part),
            "block.w2": RowwiseParallel(output_layouts=part),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=part, output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(self.model, tp_mesh, plan)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.model.block = fully_shard(checkpoint_wrapper(self.model.block), mesh=dp_mesh, mp_policy=policy)
        fully_shard(self.model, mesh=dp_mesh, mp_policy=policy)

    def on_train_start(self) -> None:
        torch.manual_seed(self.global_rank)
        self.model.draw()

    def on_train_batch_start(self, *_: Any) -> None:
        self.first = self.first or [parameter.to_local().clone() for parameter in self.parameters()]

    def training_step(self, batch: Tensor) -> Tensor:
        logits = self.model(batch[:, :-1])
        with loss_parallel():
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.report.append(loss.item())
        return loss

    def backward(self, *args: Any, **kwargs: Any) -> None:
        with loss_parallel():
            super().backward(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=0.2, foreach=True)

    def train_dataloader(self) -> DataLoader:
        first = torch.randint(16, (STEPS * BATCH, 1), generator=torch.Generator().manual_seed(1))
        return DataLoader((first + torch.arange(9)) % 16, batch_size=BATCH // 4)  # each token follows from the last

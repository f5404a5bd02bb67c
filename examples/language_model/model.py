import math
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu


class Attention(nn.Module):
    """Causal self-attention with rotary position embeddings (RoPE: Su et al. 2021)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, width, bias=False)
        self.values = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        mixed = scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def rotate(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Apply rotary position embeddings to ``x`` of shape (batch, heads, length, features)."""
    length, features = x.shape[-2:]
    frequencies = base ** (-torch.arange(0, features, 2, device=x.device) / features)
    angles = torch.arange(length, device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class SwiGLU(nn.Module):
    """The gated feed-forward layer of Shazeer 2020."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(width, heads)
        self.feed_forward_norm, self.feed_forward = nn.RMSNorm(width), SwiGLU(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, width: int, layers: int, heads: int, hidden: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def shard(net: Transformer, mesh: DeviceMesh) -> None:
    """Shard each block, and the rest, over the mesh by FSDP2."""
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)


class LanguageModel(pl.LightningModule):
    """Predict the next byte of a text. An ordinary LightningModule.

    Args:
        width: Size of the hidden states between blocks.
        layers: Number of blocks.
        heads: Number of attention heads.
        hidden: Size of the feed-forward layers.
        lr: Peak learning rate. It rises during the first tenth of the steps, then decays to a tenth of its peak along a
            cosine.
    """

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4, hidden: int = 176, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Any = None
        self.lr = lr

    def configure_model(self) -> None:
        if self.net is not None:
            return
        sizes = {name: self.hparams[name] for name in ("width", "layers", "heads", "hidden")}
        if not isinstance(self.trainer.strategy, ModelParallelStrategy):
            self.net = Transformer(**sizes)
            return
        mesh = self.device_mesh["data_parallel"]
        # on GPUs the shards are initialized in place: no rank ever holds the whole model
        with torch.device("meta" if mesh.device_type == "cuda" else "cpu"):
            self.net = Transformer(**sizes)
        shard(self.net, mesh)

    def loss(self, text: Tensor) -> Tensor:
        return cross_entropy(self.net(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        bits = self.loss(batch[0]) / math.log(2)
        self.log("val_bits_per_byte", bits, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        warm_up = max(1, steps // 10)

        def factor(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

"""Modules and optimizers of other packages end as under DDP, under every scheme; random weights, nothing is loaded.

Every night a job installs them; tests of those that are missing are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from problems import one_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiercomm import DASO, AllReduce, DiLoCo, Gossip, HierarchicalStrategy, PeriodicAveraging, StepsDelay

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

SCHEMES: dict[str, Callable[[], Any]] = {
    "all_reduce": AllReduce,
    "periodic": lambda: PeriodicAveraging(sync_every=4),
    "daso": lambda: DASO(sync_every=2, warmup=0, cooldown=0),
    # most packages train by Adam, which the default local rule refuses
    "steps_delay": lambda: StepsDelay(delay=2, warmup_steps=4, local_update="sgd", local_lr_scale=1.0),
    "gossip": lambda: Gossip(fragments=2),
    # outer momentum of 0.9 overshoots in runs of so few periods
    "diloco": lambda: DiLoCo(sync_every=4, outer_optimizer=partial(torch.optim.SGD, lr=0.7)),
}
"""By the name of a test: short periods, for short runs."""


class Wrapped(pl.LightningModule):
    """A module of a package, and its loss on integers that count up."""

    def __init__(self, optimizer: Any = torch.optim.SGD, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = self.make()
        self.make_optimizer, self.lr = optimizer, lr

    def make(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, numbers: Tensor) -> Tensor:
        return self.net(input_ids=numbers, labels=numbers).loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad], lr=self.lr)

    def train_dataloader(self) -> DataLoader:
        first = torch.randint(0, 30, (16 * self.trainer.world_size, 1), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset((first + torch.arange(8)) % 30), batch_size=4)


class Llama(Wrapped):
    """transformers: tied weights, and activations that are computed again in the backward pass."""

    def make(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        module = LlamaForCausalLM(LlamaConfig(vocab_size=30, tie_word_embeddings=True, use_cache=False, **sizes))
        module.gradient_checkpointing_enable({"use_reentrant": False})
        return module.train()

    def check(self) -> None:
        assert self.net.lm_head.weight is self.net.model.embed_tokens.weight


class Adapted(Llama):
    """peft: LoRA on a frozen base, and a head that is trained as a whole."""

    def make(self) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        base = super().make()
        base.enable_input_require_grads()
        return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"]))

    def check(self) -> None:
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        assert len(trained) == 2 * 2 + 5  # of two layers, and all norms
        assert all("lora" in name or "modules_to_save" in name for name in trained)


class Residual(Wrapped):
    """timm: BatchNorm and drop path, whose random numbers must be those under DDP."""

    def make(self) -> nn.Module:
        import timm

        return timm.create_model("resnet10t", num_classes=3, in_chans=1, drop_path_rate=0.2).double()

    def loss(self, numbers: Tensor) -> Tensor:
        images = numbers.double().view(-1, 1, 1, 8).expand(-1, 1, 32, 8).repeat(1, 1, 1, 4)
        return nn.functional.cross_entropy(self.net(images / 30), numbers[:, 0] % 3)

    def check(self) -> None:
        pass


def eight_bits(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, lr=lr)


def trained(make: Any, scheme: Any, folder: Path) -> dict[str, Tensor]:
    """Fit on two nodes of one rank; return the trained values, which are those of the checkpoint."""
    pl.seed_everything(1, verbose=False)
    module, saves = make(), ModelCheckpoint(folder, save_last=True, save_weights_only=False)
    frozen = {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}
    strategy = "ddp" if scheme is None else HierarchicalStrategy(scheme, ranks_per_node=1)
    more = {"max_epochs": 3, "callbacks": [saves], "enable_checkpointing": True}
    one_trainer(folder, devices=2, strategy=strategy, **more).fit(module)
    module.check()
    for name, before in frozen.items():
        assert torch.equal(module.get_parameter(name), before), name
    plain = make()
    plain.load_state_dict(torch.load(saves.last_model_path, weights_only=False)["state_dict"])
    if scheme is not None:
        for name, value in plain.named_parameters():
            assert torch.equal(value, module.get_parameter(name)), name
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def of_every_scheme(make: Any, names: list[str], folder: Path) -> dict[str, dict[str, Tensor]]:
    schemes = {"ddp": None, "every step": PeriodicAveraging(1), **{name: SCHEMES[name]() for name in names}}
    return {name: trained(make, scheme, folder / name) for name, scheme in schemes.items()}


@pytest.mark.parametrize(
    ("package", "make", "equal"),
    [
        ("transformers", Llama, ("all_reduce", "every step")),
        ("peft", partial(Adapted, lr=0.5), ("all_reduce", "every step")),
        ("timm", Residual, ("all_reduce",)),  # its pooling turns rounding errors into larger ones
        ("torchao", partial(Llama, eight_bits, lr=1e-3), ("all_reduce",)),
    ],
)
def test_modules_of_other_packages_train(borrow, package, make, equal):
    pytest.importorskip(package)
    pytest.importorskip("transformers")
    names = [name for name in SCHEMES if (package, name) != ("torchao", "steps_delay")]  # it compiles its steps
    one, other = borrow(partial(of_every_scheme, make, names), 2)
    for name in equal:
        torch.testing.assert_close(one[name], one["ddp"], msg=lambda why, name=name: f"{name}: {why}")
    for name, values in one.items():
        assert all(value.isfinite().all() and torch.equal(value, other[name][key]) for key, value in values.items())

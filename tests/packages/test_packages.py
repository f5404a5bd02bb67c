"""Each package fits, saves, loads and predicts as its documentation says; what differs is the strategy alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hiercomm import Health, HierarchicalFabricStrategy, HierarchicalStrategy

from .conftest import SCHEMES

RANKS = 2


def strategy(how: str) -> Any:
    """Return DDP, or a scheme on two nodes of one rank."""
    if how == "ddp":
        return "ddp_fork"
    return HierarchicalStrategy(SCHEMES[how](), ranks_per_node=1, start_method="fork", health=Health(hang_timeout=60.0))


def trainer_arguments(how: str) -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "devices": RANKS,
        "strategy": strategy(how),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two state dicts hold the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one)


def darts(folder: Path, how: str) -> dict[str, Any]:
    import numpy as np
    from darts import TimeSeries
    from darts.models import NLinearModel

    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # darts' own files hold classes, under any strategy
    series = TimeSeries.from_values(np.sin(np.arange(240) / 5).astype(np.float32))
    model = NLinearModel(
        input_chunk_length=12,
        output_chunk_length=6,
        n_epochs=6,
        batch_size=8,
        random_state=0,
        optimizer_kwargs={"lr": 0.02},
        pl_trainer_kwargs=trainer_arguments(how),
    )
    model.fit(series[:200], val_series=series[180:])
    model.save(str(folder / "it.pt"))
    back = NLinearModel.load(str(folder / "it.pt"))
    said = model.predict(6, series=series[:200], trainer=_plain_trainer()).values()
    return {
        "loss": float(np.abs(said - series[200:206].values()).mean()),
        "bound": 0.4,
        "saved": same(back.model.state_dict(), model.model.state_dict()),
    }


def _plain_trainer() -> Any:
    import pytorch_lightning

    return pytorch_lightning.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)


def litgpt(folder: Path, how: str) -> dict[str, Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.pretrain import fit, initialize_weights

    plugin: Any = DDPStrategy(start_method="fork")
    if how != "ddp":
        plugin = HierarchicalFabricStrategy(SCHEMES[how](), ranks_per_node=1, start_method="fork")
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=plugin)
    config = Config(block_size=16, vocab_size=32, padded_vocab_size=32, n_layer=1, n_head=2, n_embd=16, name="small")
    config_of_training = TrainArgs(
        save_interval=None,
        global_batch_size=8,
        micro_batch_size=4,
        lr_warmup_steps=2,
        max_tokens=4 * 16 * RANKS * 24,
        max_norm=1.0,
        tie_embeddings=False,
    )

    def main(fabric: Any) -> None:
        fabric.seed_everything(0)
        model = GPT(config)
        initialize_weights(fabric, model, n_layer=config.n_layer, n_embd=config.n_embd)
        model = fabric.setup(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
        counting = (torch.arange(17) + torch.arange(256).unsqueeze(1)) % 32
        loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(counting, batch_size=4, shuffle=True))
        state = {"model": model, "optimizer": optimizer, "train_dataloader": loader, "iter_num": 0, "step_count": 0}
        evaluation = EvalArgs(interval=8, max_iters=4, initial_validation=False, final_validation=True)
        fit(fabric, RANKS, state, loader, loader, folder, None, config_of_training, evaluation)
        fabric.save(folder / "final" / "lit_model.pth", state)  # its own save also reads the command line of litgpt

    fabric.launch(main)
    model = GPT(config)
    model.load_state_dict(torch.load(folder / "final" / "lit_model.pth", weights_only=False)["model"])
    counting = (torch.arange(17) + torch.arange(32).unsqueeze(1)) % 32
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(counting[:, :-1]).flatten(0, 1), counting[:, 1:].flatten())
    return {"loss": float(loss), "bound": 3.0}


PACKAGES = {train.__name__: train for train in (darts, litgpt)}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_fits_saves_and_loads_as_under_ddp(name, how, apart, monkeypatch):
    pytest.importorskip(name)
    if name == "darts":
        monkeypatch.setenv("HIERCOMM_LIGHTNING", "pytorch_lightning")  # lightning_hiercomm is imported first
    said = apart(PACKAGES[name], how)
    print(name, how, said)
    loss, bound = said.pop("loss"), said.pop("bound")
    assert loss < bound
    assert all(said.values()), said

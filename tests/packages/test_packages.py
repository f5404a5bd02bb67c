"""Each package fits, saves, loads and predicts as its documentation says; what differs is the strategy alone."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
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


# ---- chemprop: a module of its own, plain Trainer ----------------------------------------------------------------


def chemprop(folder: Path, how: str) -> dict[str, Any]:
    import lightning.pytorch as pl
    import numpy as np
    from chemprop import data, models
    from chemprop import nn as layers

    chains = ["C" * (i % 9 + 1) + end for i, end in enumerate(["O", "N", "Cl", "F", "C(=O)O", "c1ccccc1"] * 16)]
    points = [data.MoleculeDatapoint.from_smi(chain, np.array([float(len(chain))])) for chain in chains]
    training, validation = data.MoleculeDataset(points[:80]), data.MoleculeDataset(points[80:])
    validation.normalize_targets(training.normalize_targets())
    torch.manual_seed(0)
    module = models.MPNN(
        layers.BondMessagePassing(d_h=32), layers.MeanAggregation(), layers.RegressionFFN(input_dim=32), batch_norm=True
    )
    trainer = pl.Trainer(max_epochs=12, default_root_dir=folder, logger=False, **trainer_arguments(how))
    trainer.fit(
        module,
        data.build_dataloader(training, batch_size=8, seed=0),
        data.build_dataloader(validation, batch_size=8, shuffle=False),
    )
    trainer.save_checkpoint(folder / "after.ckpt")
    models.save_model(folder / "it.pt", module)
    newest = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)["state_dict"]
    return {
        "loss": float(trainer.callback_metrics["val_loss"]),
        "bound": 0.8,
        "saved": same(models.load_model(folder / "it.pt").state_dict(), module.state_dict()),
        "after fit": same(models.MPNN.load_from_checkpoint(folder / "after.ckpt").state_dict(), module.state_dict()),
        "newest": same(newest, module.state_dict()),
    }


# ---- darts: makes its Trainer from keywords, which it pickles; `pytorch_lightning` -------------------------------


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


# ---- lightly: its example of BYOL, with a teacher that follows its student ---------------------------------------


def lightly(folder: Path, how: str) -> dict[str, Any]:
    import lightning.pytorch as pl
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from lightly.utils.scheduler import cosine_schedule

    class BYOL(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU())
            self.projection_head = BYOLProjectionHead(32, 64, 16)
            self.prediction_head = BYOLPredictionHead(16, 64, 16)
            self.backbone_momentum = copy.deepcopy(self.backbone)
            self.projection_head_momentum = copy.deepcopy(self.projection_head)
            deactivate_requires_grad(self.backbone_momentum)
            deactivate_requires_grad(self.projection_head_momentum)
            self.criterion = NegativeCosineSimilarity()

        def forward(self, x: Tensor) -> Tensor:
            return self.prediction_head(self.projection_head(self.backbone(x)))

        def forward_momentum(self, x: Tensor) -> Tensor:
            return self.projection_head_momentum(self.backbone_momentum(x)).detach()

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
            update_momentum(self.backbone, self.backbone_momentum, m=momentum)
            update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
            x0, x1 = batch
            p0, z0 = self.forward(x0), self.forward_momentum(x0)
            p1, z1 = self.forward(x1), self.forward_momentum(x1)
            loss = 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.06)

    torch.manual_seed(0)
    x = torch.randn(256, 16)
    pairs = torch.utils.data.TensorDataset(x + 0.1 * torch.randn(256, 16), x + 0.1 * torch.randn(256, 16))
    module = BYOL()
    trainer = pl.Trainer(max_epochs=4, default_root_dir=folder, logger=False, **trainer_arguments(how))
    trainer.fit(module, torch.utils.data.DataLoader(pairs, batch_size=16, shuffle=True))
    trainer.save_checkpoint(folder / "after.ckpt")
    newest = torch.load(trainer.checkpoint_callback.best_model_path)["state_dict"]
    return {
        "loss": float(trainer.callback_metrics["loss"]),
        "bound": -0.3,
        "newest, teacher included": same(newest, module.state_dict()),
        "after fit": same(torch.load(folder / "after.ckpt")["state_dict"], module.state_dict()),
    }


# ---- gluonts: an estimator that trains, takes the best checkpoint, and gives a predictor -------------------------


def gluonts(folder: Path, how: str) -> dict[str, Any]:
    import numpy as np
    import pandas
    from gluonts.dataset.common import ListDataset
    from gluonts.model.predictor import Predictor
    from gluonts.torch import SimpleFeedForwardEstimator

    waves = [
        {"start": pandas.Period("2020-01-01", "D"), "target": np.sin(np.arange(200) / 5 + i).astype(np.float32)}
        for i in range(8)
    ]
    data = ListDataset(waves, freq="D")
    torch.manual_seed(0)
    np.random.seed(0)
    estimator = SimpleFeedForwardEstimator(
        prediction_length=6,
        context_length=12,
        batch_size=8,
        num_batches_per_epoch=16,
        lr=0.01,
        trainer_kwargs={**trainer_arguments(how), "max_epochs": 4, "default_root_dir": folder},
    )
    predictor = estimator.train(data)
    kept = folder / "predictor"
    kept.mkdir()
    predictor.serialize(kept)
    back = Predictor.deserialize(kept)
    truth = np.sin(np.arange(200, 206) / 5)
    torch.manual_seed(0)
    said = next(iter(predictor.predict(data))).mean
    return {
        "loss": float(np.abs(said - truth).mean()),
        "bound": 0.8,
        "saved": same(back.prediction_net.state_dict(), predictor.prediction_net.state_dict()),
    }


# ---- pytorch-tabular: takes strategies by name only, and restores its best checkpoint ----------------------------


def pytorch_tabular(folder: Path, how: str) -> dict[str, Any]:
    import pandas
    from pytorch_lightning.strategies import StrategyRegistry
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig
    from sklearn.datasets import load_digits

    name = "ddp_fork"
    if how != "ddp":
        name = "two_nodes"
        health = Health(hang_timeout=60.0)
        arguments = {"scheme": SCHEMES[how](), "ranks_per_node": 1, "start_method": "fork", "health": health}
        StrategyRegistry.register(name, HierarchicalStrategy, **arguments)
    digits = load_digits()
    pixels = [f"pixel{i}" for i in range(64)]
    table = pandas.DataFrame(digits.data.astype("float32"), columns=pixels)
    table["digit"] = digits.target
    model = TabularModel(
        data_config=DataConfig(target=["digit"], continuous_cols=pixels, num_workers=0),
        model_config=CategoryEmbeddingModelConfig(task="classification", layers="32", learning_rate=0.01),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=32,
            max_epochs=6,
            accelerator="cpu",
            devices=RANKS,
            progress_bar="none",
            checkpoints="valid_loss",
            checkpoints_path=str(folder / "checkpoints"),
            load_best=True,
            early_stopping="valid_loss",
            trainer_kwargs={"strategy": name},
        ),
        verbose=False,
    )
    model.fit(train=table[:1200], validation=table[1200:1500])
    model.save_model(str(folder / "kept"))
    back = TabularModel.load_model(str(folder / "kept"))
    return {
        "loss": float((back.predict(table[1500:])["digit_prediction"] != table["digit"][1500:]).mean()),
        "bound": 0.4,
        "saved": same(back.model.state_dict(), model.model.state_dict()),
    }


# ---- nequip: its command, with a configuration; weights are averaged, and swapped in for validation --------------


def nequip(folder: Path, how: str) -> dict[str, Any]:
    import yaml
    from nequip.utils import unittests

    config = yaml.safe_load((Path(next(iter(unittests.__path__))) / "minimal_toy_emt.yaml").read_text())
    trainer = config["trainer"]
    trainer.update(max_epochs=3, accelerator="cpu", devices=RANKS, enable_progress_bar=False, logger=False)
    trainer["strategy"] = "ddp_fork"
    if how != "ddp":
        scheme = SCHEMES[how]()
        arguments = {
            "periodic": {"sync_every": 4},
            "daso": {"sync_every": 2, "warmup": 0, "cooldown": 0},
            "steps_delay": {"delay": 2, "warmup_steps": 4, "local_update": "sgd", "local_lr_scale": 1.0},
            "gossip": {"fragments": 2},
            "diloco": {"sync_every": 4},
        }.get(how, {})
        trainer["strategy"] = {
            "_target_": "lightning_hiercomm.HierarchicalStrategy",
            "scheme": {"_target_": f"lightning_hiercomm.{type(scheme).__name__}", **arguments},
            "ranks_per_node": 1,
            "start_method": "fork",
            "health": {"_target_": "lightning_hiercomm.Health", "hang_timeout": 60.0},
        }
    # of a rank's own frames only the first writes its predictions, in pieces
    trainer["callbacks"] = [c for c in trainer["callbacks"] if "XYZ" not in c["_target_"]]
    trainer["callbacks"] = [c for c in trainer["callbacks"] if "LossCoefficientMonitor" not in c["_target_"]]
    config["data"]["split_dataset"]["dataset"]["supercell"] = [2, 2, 2]
    config["run"] = ["train", "val"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "nequip.scripts.train", "-cp", str(folder), "-cn", "config"]
    environment = {**os.environ, "TEST_VAL_TWO": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"hydra.run.dir={folder / 'run'}"], env=environment, capture_output=True, text=True, timeout=220
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    last = torch.load(folder / "run" / "last.ckpt", weights_only=False)
    tensors = [value for value in last["state_dict"].values() if isinstance(value, Tensor)]
    finite = [value.isfinite().all() for value in tensors if value.is_floating_point()]
    monitored = next(c for name, c in last["callbacks"].items() if "val0_epoch" in name)
    return {"loss": float(monitored["best_model_score"]), "bound": math.inf, "finite": all(map(bool, finite))}


# ---- litgpt: its own loop on Fabric ------------------------------------------------------------------------------


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


PACKAGES = {train.__name__: train for train in (chemprop, darts, lightly, gluonts, pytorch_tabular, nequip, litgpt)}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_fits_saves_and_loads_as_under_ddp(name, how, apart, monkeypatch):
    pytest.importorskip(name)
    if name in ("darts", "pytorch_tabular"):
        monkeypatch.setenv("HIERCOMM_LIGHTNING", "pytorch_lightning")  # lightning_hiercomm is imported first
    said = apart(PACKAGES[name], how)
    print(name, how, said)
    loss, bound = said.pop("loss"), said.pop("bound")
    assert loss < bound
    assert all(said.values()), said

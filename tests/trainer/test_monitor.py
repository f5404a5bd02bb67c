import csv
import re
from collections import defaultdict
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.loggers import CSVLogger
from problems import one_trainer

from lightning_hiercomm import CommunicationMonitor, HierarchicalStrategy, ParameterSync, PeriodicAveraging
from lightning_hiercomm.schemes import Schedule
from lightning_hiercomm.trainer.monitor import _compared

MODEL_BYTES = (32 * 2 + 2) * 4  # BoringModel is one Linear(32, 2) in float32


# Contention the model, a synchronization checks that all nodes took the same number of steps: 16 bytes per rank.
def model_sized(factor, ranks_per_node=1):
    preflight = 24 * ranks_per_node  # of two nodes
    return pytest.approx(factor * (MODEL_BYTES + preflight), abs=8 * factor)


def trainer(tmp_path, scheme, *, devices=2, ranks_per_node=1, start_method="fork", callbacks=(), **chosen):
    arguments = {"max_epochs": None, "max_steps": 8, "log_every_n_steps": 4, "limit_val_batches": 0}
    arguments |= {"logger": CSVLogger(tmp_path, name="", version=""), **chosen}
    strategy = HierarchicalStrategy(scheme, ranks_per_node=ranks_per_node, start_method=start_method)
    callbacks = [CommunicationMonitor(), *callbacks]
    return one_trainer(tmp_path, devices=devices, strategy=strategy, callbacks=callbacks, **arguments)


def logged(tmp_path):
    rows = defaultdict(dict)
    with Path(tmp_path, "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            rows[int(row["step"])] |= {name: float(value) for name, value in row.items() if value}
    return rows


def test_changing_the_strategy_on_resume_warns_once(tmp_path, capsys):
    monitor = CommunicationMonitor()
    fitter = Trainer(accelerator="cpu", devices=1, callbacks=[monitor], logger=CSVLogger(tmp_path), max_steps=8)
    with pytest.warns(UserWarning, match="CommunicationMonitor") as warned:
        fitter.fit(BoringModel())
    about = [str(warning.message) for warning in warned if "CommunicationMonitor" in str(warning.message)]
    assert about == [
        "CommunicationMonitor logs nothing in this run: it needs a HierarchicalStrategy, but the strategy is"
        " SingleDeviceStrategy"
    ]
    assert fitter.global_step == 8
    assert "Communication of" not in capsys.readouterr().out


class Rarely(Schedule):
    """A schedule with no period, as docs/howto/add_a_scheme.md lets one write it."""

    def due(self, step, step_in_epoch, parts):
        return range(parts) if step in (2, 3, 7) else ()

    def longest_staleness(self, parts):
        return 0


def test_a_schedule_without_a_period_is_watched(tmp_path, capsys):
    trainer(tmp_path, ParameterSync(schedule=Rarely()), devices=1, start_method="popen").fit(BoringModel())
    assert "Communication of 8 optimizer steps" in capsys.readouterr().out
    assert all(row["hiercomm/sync_every"] == 0 for row in logged(tmp_path).values())


def test_logs_bytes_per_step_of_the_node(tmp_path):
    class Logging(BoringModel):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss["loss"])
            return loss

    # Two nodes of two ranks average every second step: a node sends the model to the other one once per average.
    trainer(tmp_path, PeriodicAveraging(sync_every=2), devices=4, ranks_per_node=2).fit(Logging())
    rows = logged(tmp_path)
    assert sorted(rows) == [3, 7], "Lightning's own steps: every 4th, counted from 0"
    for row in rows.values():
        assert "train_loss" in row, "the same rows"
        assert row["hiercomm/inter_bytes"] == model_sized(0.5, ranks_per_node=2)
        assert row["hiercomm/intra_bytes"] > 0
        assert row["hiercomm/exposed_seconds"] > 0
        parts = [row[f"hiercomm/{level}_exposed_seconds"] for level in ("intra", "inter", "world")]
        assert row["hiercomm/exposed_seconds"] == pytest.approx(sum(parts))
        assert "hiercomm/steps" not in row
    assert [row["hiercomm/synchronizations"] for row in rows.values()] == [2, 4]


@pytest.mark.parametrize(
    ("module", "arguments", "rows"),
    [
        (BoringModel(), {"accumulate_grad_batches": 4, "log_every_n_steps": 2}, 3),  # an average of 4 batches each
        (ManualOptimBoringModel(), {}, 1),
    ],
    ids=["batches are accumulated", "optimization is manual"],
)
def test_bytes_are_counted_per_optimizer_step_where(tmp_path, module, arguments, rows):
    trainer(tmp_path, PeriodicAveraging(sync_every=1), **arguments).fit(module)
    found = logged(tmp_path).values()
    assert len(found) >= rows
    assert all(row["hiercomm/inter_bytes"] == model_sized(1) for row in found)


def test_the_table_sums_up_the_run(tmp_path, capfd):
    trainer(tmp_path, PeriodicAveraging(4), max_steps=12).fit(BoringModel())
    out = capfd.readouterr().out
    cells = re.search(r"inter \(between nodes\) +([\d.]+) +([\d.e-]+)", out).groups()
    assert float(cells[1]) == pytest.approx((MODEL_BYTES + 24) / 4 / 1e6, rel=0.2)
    assert float(cells[0]) / 12 / 2 == pytest.approx(float(cells[1]), abs=0.0005 / 12)
    assert out.count("Communication of 12 optimizer steps on 2 ranks, 2 nodes") == 1, "rank zero alone prints"
    assert "synchronizations between nodes: 3, one in 4 steps" in out
    # Two ranks, two nodes: a ring sends the model once per rank and step.
    assert f"plain DDP between nodes:  {12 * 2 * MODEL_BYTES / 1e6:.3f} MB" in out
    seconds = float(re.search(r"2 nodes, in ([\d.]+) s", out)[1])
    waited, share = map(float, re.search(r"waited for communication: ([\d.]+) s per rank, (\d+)% of", out).groups())
    parts = [float(line.split()[-1]) for line in out.splitlines() if re.match(r"  (intra|inter|world) ", line)]
    assert sum(parts) == pytest.approx(waited, abs=0.015)
    assert share / 100 == pytest.approx(waited / seconds, abs=0.01 + 0.01 / seconds)  # as they are rounded


def test_the_phase_is_logged_as_a_number(tmp_path):
    trainer(tmp_path, PeriodicAveraging(2, warmup_steps=4), log_every_n_steps=2).fit(BoringModel())
    assert [row["hiercomm/phase"] for row in logged(tmp_path).values()] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("sent", "ddp", "said"),
    [
        ((1.5e6, 0.5e6), 9e6, "9.000 MB, 4.5 times what was sent (inter + world)"),
        ((1.5e6, 0.5e6), 1e6, "1.000 MB; 2.0 times that was sent (inter + world)"),
        ((0, 0), 1e6, "1.000 MB"),
        ((0, 1e6), 0, "nothing, there is one node only"),
    ],
)
def test_the_comparison_with_ddp_never_counts_below_one(sent, ddp, said):
    assert _compared(dict(zip(("inter_bytes", "world_bytes"), sent, strict=True)), ddp) == said


def test_second_fit_is_counted_on_its_own(tmp_path, capfd):
    scheme = PeriodicAveraging(sync_every=2)
    limits = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 4}
    fitter = trainer(tmp_path, scheme, devices=1, start_method="popen", **limits)
    fitter.fit(BoringModel())
    fitter.fit_loop.max_epochs = 3
    fitter.fit(BoringModel())
    out = capfd.readouterr().out
    assert "Communication of 4 optimizer steps on 1 ranks" in out
    assert "Communication of 8 optimizer steps on 1 ranks" in out

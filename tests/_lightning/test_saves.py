"""What Lightning writes into checkpoints, and how it names files."""

from __future__ import annotations

import inspect
import pickle

import lightning.pytorch as pl
import numpy
import pytest
import torch
from _lightning.conftest import boring, quiet
from lightning.fabric.strategies.fsdp import _is_sharded_checkpoint
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import nn

from lightning_hiercomm._lightning.saves import (
    METADATA_FILENAME,
    dump_within,
    entries_of_rank,
    number_names_by_own_files,
    taking_shapes,
)
from lightning_hiercomm._lightning.trainer import restore_trainer


def test_numbers_of_schedulers_are_saved_as_pythons():
    entries = entries_of_rank({"lr_schedulers": [{"best": numpy.float64(2.5)}]})
    assert entries == {"lr_schedulers": [{"best": 2.5}]}
    assert type(entries["lr_schedulers"][0]["best"]) is float  # `weights_only` loading refuses numpy's


def test_dumping_a_checkpoint_calls_save_hooks_and_keeps_the_dump():
    def around(dump, weights_only):
        said.append("before")
        checkpoint = dump(weights_only)
        said.append("after")
        return checkpoint

    said = []
    trainer = quiet(fast_dev_run=1)
    trainer.fit(boring(on_save_checkpoint=lambda *_: said.append("module")))
    dump_within(trainer, around)
    trainer._checkpoint_connector.dump_checkpoint(False)
    assert said == ["before", "module", "after"]
    restore_trainer(trainer)
    pickle.dumps(trainer._checkpoint_connector.dump_checkpoint(True)["loops"])
    assert said == ["before", "module", "after", "module"]
    assert "dump_checkpoint" not in vars(trainer._checkpoint_connector)


def test_files_are_numbered_by_the_callback_not_by_the_folder(tmp_path):
    callback = pl.callbacks.ModelCheckpoint(tmp_path, "{epoch}", "x")
    run, metrics = quiet(callbacks=[callback], enable_checkpointing=True), {"epoch": torch.tensor(0)}
    (tmp_path / "epoch=0.ckpt").touch()
    name = callback._get_metric_interpolated_filepath_name
    assert name(metrics, run).endswith("epoch=0-v1.ckpt")
    number_names_by_own_files(run)
    assert name(metrics, run) == str(tmp_path / "epoch=0.ckpt")
    callback.best_k_models[str(tmp_path / "epoch=0.ckpt")] = torch.tensor(1.0)
    assert name(metrics, run).endswith("epoch=0-v1.ckpt")
    restore_trainer(run)
    assert "file_exists" not in vars(callback)


def test_shard_directories_keep_the_rest_in_lightnings_file(tmp_path):
    assert not _is_sharded_checkpoint(tmp_path)
    (tmp_path / METADATA_FILENAME).touch()
    assert _is_sharded_checkpoint(tmp_path)


def test_a_module_takes_the_shapes_of_buffers_that_it_loads():
    module = nn.Sequential(nn.Linear(1, 1), nn.Module())
    module[1].register_buffer("bank", torch.zeros(2))
    module[1].register_buffer("other", torch.zeros(2))
    module[1].frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    saved = module.state_dict()
    larger = {name: torch.ones(3) for name in ("1.bank", "1.frozen")}
    with taking_shapes(module, ["1.bank", "1.frozen"]):
        module.load_state_dict({**saved, **larger})
    assert module[1].bank.tolist() == module[1].frozen.tolist() == [1.0] * 3
    assert not module[1].frozen.requires_grad
    with taking_shapes(module, ["1.bank"]), pytest.raises(RuntimeError, match=r"size mismatch for 1\.other"):
        module.load_state_dict({**module.state_dict(), "1.other": torch.ones(3)})
    with taking_shapes(module), pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        module.load_state_dict({**module.state_dict(), "1.other": torch.ones(3), "0.weight": torch.ones(2, 1)})
    with pytest.raises(RuntimeError, match=r"size mismatch for 1\.bank"):
        module.load_state_dict({**module.state_dict(), "1.bank": torch.ones(5)})


def test_the_launcher_loads_rank_0_weights_where_shapes_differ():
    source = inspect.getsource(_MultiProcessingLauncher._recover_results_in_main_process)
    assert "lightning_module.load_state_dict(" in source

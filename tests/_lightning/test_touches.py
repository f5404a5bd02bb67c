"""Every private or fragile touch of Lightning still does what `_lightning` relies on."""

from __future__ import annotations

import inspect
import pickle
import re
import signal
from contextlib import contextmanager, nullcontext

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.utilities import imports
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.tuner.batch_size_scaling import _scale_batch_size
from lightning.pytorch.tuner.lr_finder import _lr_find
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from problems import one_trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hiercomm import HierarchicalStrategy
from lightning_hiercomm._lightning import collectives
from lightning_hiercomm._lightning.collectives import (
    collectives_begun,
    collectives_of_default_group,
    gpu_is_busy,
    store_of_default_group,
)
from lightning_hiercomm._lightning.ddp import (
    FabricSyncControl,
    PassThroughDDP,
    SettledDDP,
    average_present_gradients,
    explain_unused_parameters,
    forward_nothing,
    is_not_insisted_on,
    keep_sync_batchnorm_in_group,
    register_bucket_hook,
    time_buffer_broadcasts,
)
from lightning_hiercomm._lightning.launcher import (
    check_program_can_run_again,
    check_ranks_of_node,
    process_group_meets_at,
)
from lightning_hiercomm._lightning.saves import (
    METADATA_FILENAME,
    copied_where,
    dump_within,
    entries_of_rank,
    holds_averaged_weights,
    number_names_by_own_files,
    taking_shapes,
)
from lightning_hiercomm._lightning.trainer import (
    accumulates,
    batches_begun,
    batches_that_stepped,
    draw_first_indices,
    exception_of_tuner,
    is_between_batches,
    is_interrupted,
    is_of_tuner,
    leave_train_dataloaders_alone,
    mark_means_of_a_step,
    mark_sigterm_received,
    names_logged_in_training,
    parts_of_loader,
    put_callback_first,
    raw_optimizer,
    reduces_mean_of_a_step,
    remove_callback,
    replace_sigterm_broadcast,
    restart_train_dataloaders,
    restore_trainer,
    share_logged_names,
    skips_backward,
    takes_dataloader_iter,
    validates_by_the_clock,
    wrap_train_dataloaders,
)
from lightning_hiercomm.comm.dtensor import fully_sharded_modules, local
from lightning_hiercomm.comm.torch import unprofiled
from lightning_hiercomm.nodes.versions import version_of


def trainer(**arguments) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, "enable_model_summary": False, **quiet, **arguments})


def test_the_epoch_loop_calls_the_sigterm_broadcast_before_every_batch():
    # on one rank it is not called at all, so look at the source: this is what `replace_sigterm_broadcast` stands on
    source = inspect.getsource(_TrainingEpochLoop.advance)
    assert "self._broadcast_sigterm_tensor()" in source
    assert source.index("self._broadcast_sigterm_tensor()") < source.index("next(data_fetcher)")
    assert "torch.distributed.broadcast(" in inspect.getsource(_TrainingEpochLoop._broadcast_sigterm_tensor)


class Together:
    """Stands in for a control plane, and records its calls.

    Args:
        stops: Whether all ranks come to the next batch.
        requeue: Whether they do to be queued again.
    """

    def __init__(self, stops: bool = False, requeue: bool = False) -> None:
        self.stops, self.requeue_requested, self.stops_together = stops, requeue, True
        self.heard: list[str] = []

    def should_stop(self) -> bool:
        return self.stops

    def request_stop(self) -> None:
        self.heard.append("term")

    def request_requeue(self) -> None:
        self.heard.append("requeue")

    def go_on(self) -> None:
        self.heard.append("go on")


def test_the_replaced_broadcast_stops_the_run_and_can_be_put_back():
    run = trainer()
    replace_sigterm_broadcast(run, Together(stops=True))
    with pytest.raises(SIGTERMException):
        run.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert run.received_sigterm
    restore_trainer(run)
    assert "_broadcast_sigterm_tensor" not in vars(run.fit_loop.epoch_loop)
    assert {"_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"}.isdisjoint(vars(run._signal_connector))


def test_slurms_signal_saves_at_a_batch_common_to_all_ranks(monkeypatch, tmp_path):
    saved = []
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.signal_connector.call", saved.append)
    monkeypatch.setattr(pl.Trainer, "save_checkpoint", lambda self, path: saved.append(path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = trainer(plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR2)], default_root_dir=tmp_path)
    ranks = Together(stops=True, requeue=True)
    replace_sigterm_broadcast(run, ranks)
    run.state.fn = TrainerFn.FITTING
    run._signal_connector.register_signal_handlers()
    try:
        signal.raise_signal(signal.SIGUSR2)
        assert (ranks.heard, saved) == (["requeue"], [])
        run.fit_loop.epoch_loop._broadcast_sigterm_tensor()
        expected = [f"{tmp_path}/hpc_ckpt_1.ckpt", ["scontrol", "requeue", "7"]]
        assert (ranks.heard, saved) == (["requeue", "go on"], expected)
        ranks.stops_together = False  # no collective would end
        run.fit_loop.epoch_loop._broadcast_sigterm_tensor()
        assert (ranks.heard.pop(), saved) == ("go on", expected)
        run.state.fn = TrainerFn.VALIDATING  # where there are no batches of training
        signal.raise_signal(signal.SIGUSR2)
        assert saved == 2 * expected
    finally:
        run._signal_connector.teardown()


def test_a_sigterm_reaches_the_replaced_handler_only():
    run, ranks = trainer(), Together()
    replace_sigterm_broadcast(run, ranks)
    run._signal_connector.register_signal_handlers()
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        run._signal_connector.teardown()
    assert ranks.heard == ["term"]
    assert not run.received_sigterm


def test_lightnings_fork_launcher_has_the_members_we_override():
    launch = inspect.getsource(_MultiProcessingLauncher.launch)
    assert launch.index("self._wrapping_function,") < launch.index("self.procs = ") < launch.index(".join()")
    assert issubclass(SIGTERMException, SystemExit)  # which leaves a rank with exit code 0


def test_a_version_without_the_touched_method_is_refused(monkeypatch):
    monkeypatch.delattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor")
    with pytest.raises(RuntimeError, match=r"no _TrainingEpochLoop\._broadcast_sigterm_tensor"):
        replace_sigterm_broadcast(trainer(), Together())


def test_lightning_sees_a_marked_sigterm():
    run = trainer()
    assert not run.received_sigterm
    mark_sigterm_received(run)
    assert run.received_sigterm


def test_the_raw_optimizer_is_the_users_own():
    seen = []

    class Model(BoringModel):
        def training_step(self, batch, batch_idx):
            seen.append((raw_optimizer(self.optimizers()), self.trainer.optimizers[0]))
            return super().training_step(batch, batch_idx)

    trainer(max_steps=1, limit_val_batches=0).fit(Model())
    ((raw, users),) = seen
    assert raw is users
    assert type(raw) is torch.optim.SGD


def test_an_exception_sets_the_trainer_state_before_callbacks_run():
    seen = []

    class Listener(pl.Callback):
        def on_exception(self, trainer, pl_module, exception):
            seen.append(is_interrupted(trainer))

    class Model(BoringModel):
        def training_step(self, batch, batch_idx):
            raise KeyError("stop")

    run = trainer(max_steps=1, callbacks=[Listener()], limit_val_batches=0)
    with pytest.raises(KeyError):
        run.fit(Model())
    assert seen == [True]
    assert run.state.status == TrainerStatus.INTERRUPTED
    assert not is_interrupted(None)


def test_the_learning_rate_finder_restores_with_its_exception_on_the_way(tmp_path):
    seen = []

    class Model(BoringModel):
        lr = 0.1

        def training_step(self, batch, batch_idx):
            raise KeyError("stop")

        def on_load_checkpoint(self, checkpoint):
            seen.append(exception_of_tuner())

    run = trainer(max_steps=1, limit_val_batches=0, default_root_dir=tmp_path)
    with pytest.raises(KeyError) as raised:
        Tuner(run).lr_find(Model(), num_training=2)
    assert seen == [raised.value]
    try:
        raise ValueError
    except ValueError:
        assert exception_of_tuner() is None


def test_names_that_training_logs_are_known_as_callbacks_may_monitor_them():
    class Model(BoringModel):
        def training_step(self, batch, batch_idx):
            self.log("plain", 1.0)
            self.log("forked", 1.0, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.log("validated", 1.0)

        def on_train_epoch_end(self):
            assert names_logged_in_training(self.trainer) == {"plain", "forked", "forked_step", "forked_epoch"}
            assert {"forked_step", "forked_epoch", "plain", "validated"} <= self.trainer.callback_metrics.keys()

    trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=1).fit(Model())


def test_lightning_averages_logged_values_in_batches_and_between_them(monkeypatch):
    monkeypatch.setattr(accelerator_connector._AcceleratorConnector, "is_distributed", True)
    seen = {}

    class Averages(SingleDeviceStrategy):
        def reduce(self, tensor, *args, **kwargs):
            seen.setdefault(tensor.item(), set()).add(is_between_batches(model.trainer))
            return tensor

    class Model(BoringModel):
        def on_train_epoch_start(self):
            self.log("epoch", 1.5, sync_dist=True, reduce_fx="max")

        def training_step(self, batch, batch_idx):
            self.log("step", 2.5, sync_dist=True)
            self.log("most", 3.5, sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.log("validated", 4.5, sync_dist=True, reduce_fx="max")

    model = Model()
    some = {"limit_train_batches": 2, "limit_val_batches": 1, "use_distributed_sampler": False}
    trainer(max_epochs=1, strategy=Averages("cpu"), **some).fit(model)
    assert seen | {1.5: {True}, 2.5: {False}, 3.5: {True}, 4.5: {True}} == seen


def test_the_first_callback_comes_before_the_users_and_can_leave():
    heard = []

    class Named(pl.Callback):
        def __init__(self, name):
            self.name = name

        def on_train_batch_end(self, *_):
            heard.append(self.name)

    class First(Named):
        pass

    first = First("first")
    run = trainer(max_steps=1, callbacks=[Named("users")], limit_val_batches=0)
    put_callback_first(run, first)
    put_callback_first(run, first)  # a second fit does not double it
    run.fit(BoringModel())
    assert heard == ["first", "users"]
    remove_callback(run, first)
    assert first not in run.callbacks


def test_touched_epoch_ends_exist_in_lightning():
    """Order of calls: the last batch's end, then validation, then the epoch's end."""
    heard = []

    class Listener(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            heard.append(("batch", trainer.is_last_batch))

        def on_validation_start(self, *_):
            heard.append("validation")

        def on_train_epoch_end(self, *_):
            heard.append("epoch")

    run = trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=1, num_sanity_val_steps=0)
    run.callbacks.append(Listener())
    run.fit(BoringModel())
    assert heard == [("batch", False), ("batch", True), "validation", "epoch"]


def test_sync_batchnorm_layers_take_the_group():
    model = torch.nn.Sequential(torch.nn.SyncBatchNorm(3), torch.nn.BatchNorm1d(3))
    group = object()
    keep_sync_batchnorm_in_group(model, group)
    assert model[0].process_group is group
    assert not hasattr(model[1], "process_group")


def test_batches_that_stepped_are_the_loggers_steps():
    run = trainer(max_steps=3, limit_val_batches=0)
    assert batches_that_stepped(run) == 0
    run.fit(BoringModel())
    assert batches_that_stepped(run) == 3


def test_a_checkpoint_records_whether_it_holds_averaged_weights(tmp_path):
    averaging = pl.callbacks.WeightAveraging()
    for name, callbacks in (("averaged", [averaging]), ("plain", [])):
        run = trainer(max_steps=2, limit_val_batches=0, callbacks=callbacks, default_root_dir=tmp_path)
        run.fit(BoringModel())
        run.save_checkpoint(tmp_path / name)
        checkpoint = torch.load(tmp_path / name, weights_only=False)
        assert holds_averaged_weights(checkpoint) == (name == "averaged")


def test_the_extra_state_of_layers_is_known_by_its_key():
    class Layer(nn.Linear):
        def get_extra_state(self):
            return "own"

    checkpoint = {"epoch": 1, "state_dict": nn.Sequential(Layer(1, 1)).state_dict(), "of_hook": 2}
    assert entries_of_rank(checkpoint) == {"state_dict": {"0._extra_state": "own"}, "of_hook": 2}


def test_the_epoch_that_only_collects_batchnorm_statistics_is_seen():
    class WithBatchNorm(BoringModel):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Sequential(torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 2))

        def train_dataloader(self):
            return DataLoader(torch.randn(4, 32), batch_size=4)

    class Listener(pl.Callback):
        def __init__(self):
            self.skips = []

        def on_train_batch_start(self, trainer, *_):
            self.skips.append(skips_backward(trainer))

    listener = Listener()
    averaging = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
    trainer(max_epochs=2, limit_train_batches=1, limit_val_batches=0, callbacks=[averaging, listener]).fit(
        WithBatchNorm()
    )
    assert listener.skips == [False, False, True]


def test_the_ranks_of_a_node_are_compared_with_devices(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    environment = TorchElasticEnvironment()
    assert "validate_settings" in vars(TorchElasticEnvironment)
    check_ranks_of_node(environment)
    environment.validate_settings(num_devices=2, num_nodes=7)
    with pytest.raises(ValueError, match=r"devices=1\), but 2 ranks were started on this node: give devices=2"):
        environment.validate_settings(num_devices=1, num_nodes=1)


def test_train_dataloaders_are_left_alone_and_others_are_not():
    run = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False)
    loader, connector = DataLoader(range(8)), run._data_connector

    def prepared(mode: RunningStage) -> DataLoader:
        return connector._prepare_dataloader(loader, shuffle=False, mode=mode)

    leave_train_dataloaders_alone(run)
    assert prepared(RunningStage.TRAINING) is loader
    assert isinstance(prepared(RunningStage.VALIDATING).sampler, DistributedSampler)
    restore_trainer(run)
    assert isinstance(prepared(RunningStage.TRAINING).sampler, DistributedSampler)


def test_means_of_a_step_are_marked_and_sums_of_an_epoch_are_not(process_group):
    heard = []

    class Reducing(DDPStrategy):
        def setup(self, trainer):
            super().setup(trainer)
            mark_means_of_a_step(trainer)

        def reduce(self, tensor, *arguments, **keywords):
            heard.append(reduces_mean_of_a_step(self.lightning_module.trainer))
            return tensor

    class Logging(BoringModel):
        def on_train_start(self):
            heard.clear()

        def training_step(self, batch, batch_idx):
            self.log("x", torch.tensor(1.0), on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
            return super().training_step(batch, batch_idx)

    run = trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=0, strategy=Reducing())
    run.fit(Logging())
    assert heard[:2] == [True, True]
    assert heard[2:]
    assert not any(heard[2:])
    restore_trainer(run)
    assert "update_metrics" not in vars(run.fit_loop.epoch_loop._results)


def test_a_step_that_fetches_its_own_batches_is_seen():
    class Fetching(BoringModel):
        def training_step(self, dataloader_iter):
            return super().training_step(*next(dataloader_iter)[:2])

    assert takes_dataloader_iter(Fetching())
    assert not takes_dataloader_iter(BoringModel())


@pytest.mark.parametrize("workers", [0, 1])
def test_samplers_have_drawn_their_seed_before_a_batch_is_loaded(workers):
    drawn = []

    class Shuffled(BoringModel):
        def train_dataloader(self):
            return DataLoader(torch.arange(6.0), shuffle=True, num_workers=workers)

        def on_train_start(self):
            draw_first_indices(self.trainer)
            drawn.append(torch.get_rng_state())

        def training_step(self, batch, batch_idx):
            drawn.append((torch.get_rng_state(), batch.item()))
            return self.layer(torch.ones(1, 32)).sum()

    trainer(max_epochs=1, use_distributed_sampler=False).fit(Shuffled())
    before, *batches = drawn
    assert sorted(value for _, value in batches) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(torch.equal(state, before) for state, _ in batches)


def test_train_dataloaders_are_restarted():
    seen = []

    class Two(BoringModel):
        def train_dataloader(self):
            return {"a": DataLoader(torch.arange(4.0)), "b": [DataLoader(torch.arange(10.0, 14.0))]}

        def training_step(self, batch, batch_idx):
            seen.append((batch["a"].item(), batch["b"][0].item()))
            return self.layer(torch.ones(1, 32)).sum()

    class Listener(pl.Callback):
        def on_train_start(self, trainer, module):
            next(trainer.fit_loop._data_fetcher)
            restart_train_dataloaders(trainer)

    trainer(max_epochs=1, limit_val_batches=0, callbacks=[Listener()]).fit(Two())
    assert seen == [(0.0, 10.0), (1.0, 11.0), (2.0, 12.0), (3.0, 13.0)]


def test_ddp_broadcasts_its_buffers_where_we_time_it(process_group):
    waits = []

    @contextmanager
    def waiting():
        waits.append("begin")
        yield
        waits.append("end")

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(2))
    time_buffer_broadcasts(model, waiting)
    model(torch.randn(3, 2))
    assert waits == ["begin", "end"]


class Normalizes(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def training_step(self, batch):
        return self.norm(batch).sum()


def _shares_buffers(kind, passes, automatic_optimization):
    """Before which passes buffers are shared: of those that step, learn without a step, or do not learn."""
    module, shared, results = Normalizes(), [], []
    module.automatic_optimization = automatic_optimization
    model = kind(module)
    time_buffer_broadcasts(model, lambda: nullcontext(shared.append(True)))
    for what in passes:
        shared.clear()
        with torch.set_grad_enabled(what != "look"), model.no_sync() if what == "accumulate" else nullcontext():
            _DDPForwardRedirection()(model, module, "training_step", torch.ones(3, 2))
        results.append(bool(shared))
    return results


def test_buffers_are_shared_before_every_pass_that_begins_a_step(process_group):
    passes = ["step", "look", "look", "step", "step", "accumulate", "accumulate", "look", "step", "step"]
    ours = [True, True, False, True, True, True, False, False, False, True]
    assert _shares_buffers(SettledDDP, passes, automatic_optimization=True) == ours
    ddp = _shares_buffers(DistributedDataParallel, passes, automatic_optimization=True)
    assert [passes[place] for place, (one, other) in enumerate(zip(ours, ddp, strict=True)) if one != other] == ["step"]
    assert ddp[3] is False, "in the step after a validation"

    passes = ["step", "step", "look", "look", "step"]
    assert _shares_buffers(SettledDDP, passes, automatic_optimization=False) == [True, True, True, False, True]
    ddp = _shares_buffers(DistributedDataParallel, passes, automatic_optimization=False)
    assert ddp == [True, False, False, False, False]


def test_the_profiler_can_be_kept_from_recording():
    with torch.profiler.profile() as profile:
        with unprofiled():
            torch.ones(2).mul(2)
        torch.ones(2).add(2)
    names = {event.name for event in profile.events()}
    assert "aten::add" in names
    assert "aten::mul" not in names


def test_a_tensor_can_get_back_the_version_that_a_backward_pass_asks_for():
    weight = nn.Parameter(torch.ones(2))
    out = (weight * weight).sum()
    restore = version_of(weight)
    with torch.no_grad():
        weight.copy_(weight + 1).copy_(torch.ones(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(retain_graph=True)
    restore(weight.clone())  # no other tensor gets it
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(retain_graph=True)
    restore(weight)
    out.backward()
    assert weight.grad.tolist() == [2.0, 2.0]
    with torch.inference_mode():
        version_of(torch.ones(1))(torch.ones(1))


def test_files_of_tuners_have_names_by_which_they_are_known():
    for tuner in (_lr_find, _scale_batch_size):
        (name,) = re.findall(r'f"(\.\w+)\{uuid', inspect.getsource(tuner))
        assert is_of_tuner(f"/some/where/{name}1234.ckpt")
    assert not is_of_tuner("/.lr_find_/last.ckpt")


def test_lightning_refuses_to_run_a_notebook_again_and_asks_its_own_flag(monkeypatch):
    assert accelerator_connector._IS_INTERACTIVE is imports._IS_INTERACTIVE is False
    check_program_can_run_again()
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    with pytest.raises(MisconfigurationException, match="not compatible with an interactive"):
        trainer(devices=2, strategy="ddp")
    monkeypatch.setattr(imports, "_IS_INTERACTIVE", True)
    with pytest.raises(MisconfigurationException, match="_notebook"):
        check_program_can_run_again()


def test_ddp_strategy_takes_any_keyword_and_ddp_only_its_own():
    assert inspect.signature(DDPStrategy).parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    known = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    assert {"process_group", "device_mesh", "output_device", "dim", "find_unused_parameters"} <= known.keys()
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in known.values())


HAS_FSDP2 = hasattr(torch.distributed.fsdp, "fully_shard")


@pytest.mark.skipif(not HAS_FSDP2, reason="torch has it there from 2.6 on")
def test_a_dtensors_local_tensor_is_always_the_same_one(process_group):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
    layer = torch.nn.Linear(3, 2)
    torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
    assert fully_sharded_modules(torch.nn.Sequential(layer, torch.nn.ReLU())) == [layer]
    held = local(layer.weight)
    assert held is local(layer.weight)
    assert held.data_ptr() == layer.weight.to_local().data_ptr()
    layer(torch.ones(1, 3)).sum().backward()
    layer.reshard()
    with torch.no_grad():
        held.fill_(7.0)
    assert layer.weight.full_tensor().tolist() == [[7.0] * 3] * 2


@pytest.mark.skipif(not HAS_FSDP2, reason="torch has it there from 2.6 on")
def test_fsdp2_goes_on_with_gathered_parameters_until_it_reshards(process_group):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
    held = local(layer.weight)
    with torch.no_grad():
        layer(torch.ones(1, 1))  # the root stays gathered after it
        held.fill_(7.0)
        fully_sharded_modules(layer)[0].reshard()
        assert layer(torch.ones(1, 1)).item() == 7.0


def test_shard_directories_keep_the_rest_in_lightnings_file(tmp_path):
    from lightning.fabric.strategies.fsdp import _is_sharded_checkpoint

    assert not _is_sharded_checkpoint(tmp_path)
    (tmp_path / METADATA_FILENAME).touch()
    assert _is_sharded_checkpoint(tmp_path)


def test_a_process_group_uses_the_given_store():
    store = dist.HashStore()
    with process_group_meets_at(store, rank=0, size=1):
        dist.init_process_group("gloo", rank=0, world_size=1)  # there is no MASTER_ADDR for env://
    assert store.num_keys() > 0
    dist.destroy_process_group()
    with process_group_meets_at(None, rank=0, size=1), pytest.raises(ValueError, match="MASTER_ADDR"):
        dist.init_process_group("gloo", rank=0, world_size=1)


def test_unused_parameters_are_recognised_by_ddps_own_words():
    source = inspect.getsource(DDPStrategy.on_exception)
    assert "Expected to have finished reduction in the prior iteration" in source
    error = RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one. This")
    module = torch.nn.ModuleDict({"used": torch.nn.Linear(1, 1), "unused": torch.nn.Linear(1, 1)})
    module["used"](torch.ones(1)).backward()
    explain_unused_parameters(error, module)
    assert "training_step: unused.weight, unused.bias. If" in str(error)
    assert "`strategy=HierarchicalStrategy(find_unused_parameters=True)`" in str(error)
    other = RuntimeError("something else")
    explain_unused_parameters(other, module)
    assert str(other) == "something else"


def test_a_bucket_hook_reduces_the_gradients(process_group):
    seen = []

    def reduce(bucket):
        seen.append(bucket.buffer().clone())
        future = torch.futures.Future()
        future.set_result(bucket.buffer().mul_(3))
        return future

    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    register_bucket_hook(model, reduce)
    model(torch.tensor([[1.0, 2.0]])).sum().backward()
    assert torch.equal(torch.cat(seen), torch.tensor([1.0, 2.0]))
    assert torch.equal(model.module.weight.grad, torch.tensor([[3.0, 6.0]]))


def _buckets_of_two_steps(wrap, **arguments):
    """Places of the parameters of each bucket, in two steps of layers whose parameters are of 1 MB in all but one."""
    layers = [nn.Linear(600, 600, bias=False) for _ in range(3)]
    module = nn.Sequential(nn.Linear(2, 600), *layers)
    places = {id(parameter): place for place, parameter in enumerate(module.parameters())}
    model = wrap(module, **arguments)
    steps = []

    def reduce(bucket):
        steps[-1].append([places[id(parameter)] for parameter in bucket.parameters()])
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    register_bucket_hook(model, reduce)
    for _ in range(2):
        steps.append([])
        model(torch.ones(1, 2)).sum().backward()
    return steps


@pytest.mark.parametrize("views", [False, True])
def test_buckets_are_cut_from_the_first_step_on_as_ddp_cuts_them_after_it(process_group, views):
    ddp_first, ddp_then = _buckets_of_two_steps(DistributedDataParallel, gradient_as_bucket_view=views)
    first, then = _buckets_of_two_steps(SettledDDP, gradient_as_bucket_view=views)
    assert first == then == [[4], [3, 2, 1, 0]]
    assert ddp_first == [[0, 1, 2, 3, 4]]
    assert [set(bucket) for bucket in ddp_then] == [{4}, {0, 1, 2, 3}]


@pytest.mark.parametrize("argument", ["find_unused_parameters", "static_graph"])
def test_buckets_that_ddp_cuts_by_rules_of_their_own_are_ddps(process_group, argument):
    ours = _buckets_of_two_steps(SettledDDP, **{argument: True})
    assert ours == _buckets_of_two_steps(DistributedDataParallel, **{argument: True})
    assert ours[0] == ours[1]


@pytest.mark.parametrize("given", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_pass_through_ddp_has_the_attributes_of_ddp(process_group, given):
    module = nn.Linear(2, 1)
    arguments = {"process_group": dist.group.WORLD, **given}
    ddp, ours = DistributedDataParallel(module, **arguments), PassThroughDDP(module, None, arguments)
    names = ("module", "process_group", "device", "device_ids", "device_type", "output_device", "broadcast_buffers")
    names += ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "parameters_to_ignore")
    names += ("require_backward_grad_sync", "require_forward_param_sync")
    assert {name: getattr(ours, name) for name in names} == {name: getattr(ddp, name) for name in names}
    assert ours.state_dict().keys() == ddp.state_dict().keys()
    assert isinstance(ours, pl.utilities.types.DistributedDataParallel)
    with ours.no_sync():
        assert not ours.require_backward_grad_sync
    assert ours.require_backward_grad_sync


class Redirected(BoringModel):
    def training_step(self, batch, batch_idx=None):
        return self.layer(batch)


def test_a_training_step_goes_through_the_forward_of_its_ddp(process_group):
    module, batch, calls = Redirected(), torch.ones(1, 32), []
    for wrapped in (DistributedDataParallel(module), PassThroughDDP(module, None, {})):
        hooks = [each.register_forward_hook(lambda of, *_: calls.append(type(of))) for each in (wrapped, module)]
        output = DDPStrategy()._forward_redirection(wrapped, module, "training_step", batch, batch_idx=0)
        assert torch.equal(output, module.layer(batch))
        assert calls == [Redirected, type(wrapped)]
        calls.clear()
        for hook in hooks:
            hook.remove()


def test_fabric_blocks_reductions_through_the_strategys_sync_control(process_group):
    assert "self._strategy._backward_sync_control.no_backward_sync(" in inspect.getsource(Fabric.no_backward_sync)
    control, module = FabricSyncControl(), nn.Linear(2, 1)
    with control.no_backward_sync(module, enabled=True):
        pass  # a module that is not in DDP, which Fabric's own control refuses
    wrapped = DistributedDataParallel(module)
    with control.no_backward_sync(wrapped, enabled=True):
        assert not wrapped.require_backward_grad_sync
    with control.no_backward_sync(wrapped, enabled=False):
        assert wrapped.require_backward_grad_sync


def test_fabric_insists_on_a_backward_of_our_own_by_default():
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy

    class InsistsOn(SingleDeviceStrategy):
        def backward(self, *args, **kwargs):
            super().backward(*args, **kwargs)

    class DoesNot(SingleDeviceStrategy):
        @is_not_insisted_on
        def backward(self, *args, **kwargs):
            super().backward(*args, **kwargs)

    for strategy, message in ((InsistsOn("cpu"), "requires you to call `fabric.backward"), (DoesNot("cpu"), None)):
        model = Fabric(accelerator="cpu", devices=1, strategy=strategy).setup(torch.nn.Linear(1, 1))
        loss = model(torch.ones(1, 1)).sum()
        if message is None:
            torch.autograd.grad(loss, list(model.parameters()))
        else:
            with pytest.raises(RuntimeError, match=message):
                torch.autograd.grad(loss, list(model.parameters()))


def test_dumping_a_checkpoint_calls_save_hooks_and_keeps_the_dump():
    class Saves(BoringModel):
        def on_save_checkpoint(self, checkpoint):
            said.append("module")
            checkpoint["own"] = self.layer.weight

    def around(dump):
        said.append("before")
        checkpoint = dump()
        said.append("after")
        return checkpoint

    said = []
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, fast_dev_run=1)
    trainer.fit(Saves())
    dump_within(trainer, around)
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(False)
    assert said == ["before", "module", "after"]
    held = trainer.lightning_module.layer.weight
    copied = copied_where(checkpoint, lambda tensor: tensor.data_ptr() == held.data_ptr())
    assert copied["own"] is not held
    assert isinstance(copied["own"], nn.Parameter)
    assert copied["state_dict"]._metadata == checkpoint["state_dict"]._metadata
    assert copied["state_dict"]["layer.weight"] is not checkpoint["state_dict"]["layer.weight"]
    assert copied["state_dict"]["layer.bias"] is checkpoint["state_dict"]["layer.bias"]
    restore_trainer(trainer)
    pickle.dumps(trainer._checkpoint_connector.dump_checkpoint(True)["loops"])
    assert said == ["before", "module", "after", "module"]
    assert "dump_checkpoint" not in vars(trainer._checkpoint_connector)


def test_files_are_numbered_by_the_callback_not_by_the_folder(tmp_path):
    callback = pl.callbacks.ModelCheckpoint(tmp_path, "{epoch}", "x")
    run, metrics = trainer(callbacks=[callback], enable_checkpointing=True), {"epoch": torch.tensor(0)}
    (tmp_path / "epoch=0.ckpt").touch()
    name = callback._get_metric_interpolated_filepath_name
    assert name(metrics, run).endswith("epoch=0-v1.ckpt")
    number_names_by_own_files(run)
    assert name(metrics, run) == str(tmp_path / "epoch=0.ckpt")
    callback.best_k_models[str(tmp_path / "epoch=0.ckpt")] = torch.tensor(1.0)
    assert name(metrics, run).endswith("epoch=0-v1.ckpt")
    restore_trainer(run)
    assert "file_exists" not in vars(callback)


def test_a_trainer_that_validates_by_the_clock_is_known():
    assert validates_by_the_clock(trainer(val_check_interval="00:15:00:00"))
    assert not validates_by_the_clock(trainer(val_check_interval=0.5))


def test_torch_counts_the_collectives_of_all_groups(process_group):
    before = collectives_begun()
    dist.all_reduce(torch.ones(1))
    dist.broadcast(torch.ones(1), src=0, group=dist.new_group([0]))
    assert collectives_begun() >= before + 2


def test_torch_keeps_the_store_of_its_default_group(process_group):
    store = store_of_default_group()
    assert store is not None
    store.set("hiercomm", "value")
    assert store.get("hiercomm") == b"value"


def test_torch_counts_the_collectives_of_the_default_group_apart(process_group):
    before = collectives_of_default_group()
    dist.barrier()
    other = dist.new_group([0])
    dist.barrier(other)
    assert collectives_of_default_group() == before + 1
    dist.destroy_process_group(other)


ONE = torch.ones(1)
COLLECTIVES = {
    "all_reduce": lambda: dist.all_reduce(ONE.clone()),
    "broadcast": lambda: dist.broadcast(ONE.clone(), 0),
    "all_gather": lambda: dist.all_gather([ONE.clone()], ONE),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(ONE.clone(), ONE),
    "all_gather_object": lambda: dist.all_gather_object([None], 1),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ONE.clone(), ONE),
    "all_to_all_single": lambda: dist.all_to_all_single(ONE.clone(), ONE),
    "functional all_reduce": lambda: functional.all_reduce(ONE.clone(), "sum", dist.group.WORLD) + 0,
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_torch_counts_every_collective_of_the_default_group(process_group, name):
    before = collectives_of_default_group()
    COLLECTIVES[name]()
    assert collectives_of_default_group() > before


def test_a_backend_without_sequence_numbers_counts_nothing(process_group):
    class Backend:
        def _get_sequence_number_for_group(self):
            raise RuntimeError("does not yet support sequence numbers")

    class Group:
        _device_types = ("cpu", "cuda")

        def _get_backend(self, device):
            return Backend()

    dist.barrier()
    assert collectives._begun_in(Group()) == 0
    assert collectives._begun_in(dist.group.WORLD) > 0


def test_a_group_that_is_destroyed_meanwhile_ends_no_count(process_group, monkeypatch):
    class Destroyed:
        @property
        def _device_types(self):
            raise RuntimeError("the process group is gone")

    before = collectives_begun()
    groups = [*collectives.process_groups()]
    monkeypatch.setattr(collectives, "process_groups", lambda: [Destroyed(), *groups])
    assert collectives_begun() == before


def test_torch_reports_the_gpus_of_a_process():
    assert callable(torch._C._cuda_hasPrimaryContext) or not torch.backends.cuda.is_built()
    assert not gpu_is_busy() or torch.cuda.is_initialized()


def test_without_process_groups_no_collective_has_begun():
    assert collectives_begun() == 0


class _Accumulates(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append(accumulates(trainer))


@pytest.mark.parametrize("automatic", [True, False])
def test_batches_in_which_lightning_accumulates_gradients_are_known(tmp_path, automatic):
    module, seen = BoringModel(), _Accumulates()
    module.automatic_optimization = automatic
    arguments = {"accumulate_grad_batches": 2} if automatic else {}
    arguments.update(limit_train_batches=5, limit_val_batches=0, max_epochs=1)
    one_trainer(tmp_path, callbacks=[seen], **arguments).fit(module)
    assert seen.seen == ([True, False, True, False, False] if automatic else [False] * 5)


def test_gradients_are_averaged_without_a_backward_pass(process_group):
    def reduce(bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer().mul_(2).add_(1))
        return future

    model = SettledDDP(nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)))
    register_bucket_hook(model, reduce)
    first, second = model.module.parameters()
    first.grad = torch.tensor([[1.0, 2.0]])
    average_present_gradients(model, factor=3.0)
    assert first.grad.tolist() == [[7.0, 13.0]]
    assert second.grad.tolist() == [[1.0]], "a missing gradient counts as zero"
    model.zero_grad(set_to_none=True)
    model(torch.tensor([[1.0, 1.0]])).sum().backward()  # an ordinary pass follows
    assert second.grad.item() == pytest.approx(2 * first.detach().sum().item() + 1)
    average_present_gradients(nn.Linear(1, 1))  # is not in DDP


@pytest.mark.parametrize("accumulates_before", [False, True])
def test_buffers_are_shared_where_a_rank_has_no_forward_pass(process_group, accumulates_before):
    model = SettledDDP(nn.BatchNorm1d(2))
    shared = []
    model._sync_buffers = lambda: shared.append(1)
    if accumulates_before:
        with model.no_sync():
            forward_nothing(model)
        assert len(shared) == 1
    forward_nothing(model)  # ends the step
    assert len(shared) == 1
    model(torch.ones(3, 2))
    assert len(shared) == 2


class _Counts(pl.Callback):
    def __init__(self):
        self.begun = []

    def on_train_batch_start(self, trainer, *_):
        self.begun.append(batches_begun(trainer))


def test_train_dataloaders_are_wrapped_before_their_length_counts(tmp_path):
    counts, given = _Counts(), []

    def wrap(loader):
        given.append(parts_of_loader(loader))
        return DataLoader(loader.dataset, batch_size=16)

    trainer = one_trainer(tmp_path, callbacks=[counts], max_epochs=2, limit_val_batches=0)
    module = BoringModel()

    class Wraps(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            wrap_train_dataloaders(trainer, wrap)

        def teardown(self, trainer, pl_module, stage):
            restore_trainer(trainer)

    trainer.callbacks.append(Wraps())
    trainer.fit(module)
    assert trainer.num_training_batches == 4  # of 64 samples
    assert counts.begun == [1, 2, 3, 4] * 2
    assert [mode for _, mode in given] == ["max_size_cycle"]
    assert "dataloader" not in vars(trainer.fit_loop._data_source)
    loaders = {"a": [1], "b": [2]}
    assert parts_of_loader(CombinedLoader(loaders, "min_size")) == (loaders, "min_size")


def test_values_that_only_others_log_are_reduced_as_nothing(tmp_path):
    class Logs(BoringModel):
        def training_step(self, batch, batch_idx):
            self.log("mine", 2.0, on_step=False, on_epoch=True, sync_dist=True)
            return super().training_step(batch, batch_idx)

    own = []

    def gather(names):
        own.append(dict(names))
        common = {"fx": "training_step", "prog_bar": False, "logger": True, "on_step": False, "on_epoch": True}
        common |= {"add_dataloader_idx": True, "value": torch.float64}
        others = {f"training_step.{how}": {**common, "name": how, "reduce_fx": how} for how in ("mean", "max", "sum")}
        return [others, names]

    class Shares(pl.Callback):
        def on_train_epoch_end(self, trainer, *_):
            share_logged_names(trainer, gather)
            self.keys = list(trainer.fit_loop.epoch_loop._results)

    shares = Shares()
    chosen = {"strategy": HierarchicalStrategy(), "callbacks": [shares], "max_epochs": 1, "limit_val_batches": 0}
    trainer = one_trainer(tmp_path, **chosen, limit_train_batches=2)
    trainer.fit(Logs())
    assert list(own[0]) == ["training_step.mine"]
    assert shares.keys == [f"training_step.{name}" for name in ("mean", "max", "sum", "mine")]
    values = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert values["mine"] == 2.0
    assert values["sum"] == 0.0
    assert values["max"] == -float("inf")


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

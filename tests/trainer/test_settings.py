"""Arguments of the strategies: what they are, what is refused, and how they are written."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric import accelerators as of_fabric
from lightning.pytorch import accelerators as of_trainer
from lightning.pytorch.strategies import StrategyRegistry
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_hiercomm import (
    DASO,
    Health,
    HeterogeneousBatches,
    HierarchicalFabricStrategy,
    HierarchicalModelParallelStrategy,
    HierarchicalStrategy,
    PeriodicAveraging,
    Transport,
)
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.schemes import SCHEMES, Scheme
from lightning_hiercomm.trainer.settings import Settings

Ours, OnFabric = HierarchicalStrategy, HierarchicalFabricStrategy


@pytest.mark.parametrize(
    ("made", "arguments", "message"),
    [
        (Ours, {"scheme": "telepathy"}, "scheme='telepathy' is unknown; use one of all_reduce, periodic"),
        (Ours, {"scheme": 3}, "scheme=3 must be Scheme"),
        (Ours, {"scheme": PeriodicAveraging}, r"must be Scheme, .* did you mean PeriodicAveraging\(\)\?"),
        (Ours, {"scheme": Scheme()}, r"scheme=Scheme\(\) is the base class"),
        (Ours, {"timeout": 30}, "timeout=30 must be timedelta or None, not of type int"),
        (Ours, {"start_method": "fokr"}, "start_method='fokr' must be 'popen', 'spawn', 'fork' or 'forkserver'"),
        (Ours, {"find_unused_parameters": "yes"}, "find_unused_parameters='yes' must be bool"),
        (Ours, {"bucket_cap_mb": "25"}, "bucket_cap_mb='25' must be float or None"),
        (Ours, {"wire_dtype": "int3"}, "wire_dtype='int3'"),
        (Ours, {"wire_dtype": torch.bfloat16}, "wire_dtype=torch.bfloat16 must be 'float32', 'bfloat16'"),
        (Ours, {"health": "raise"}, "health='raise' must be Health, not of type str"),
        (Ours, {"process_group": object()}, "process_group cannot be set"),
        (Ours, {"model_averaging_period": 4}, "model_averaging_period cannot be set"),
        (Ours, {"device_ids": [0]}, "device_ids cannot be set"),
        (Health, {"hang_timeout": 0}, "hang_timeout=0 must be a number of seconds from 1 on, or None for never"),
        (Transport, {"bucket_mb": 0}, "bucket_mb=0 must be positive"),
        (Transport, {"inter_node": "pigeon"}, "inter_node='pigeon' must be 'torch', 'gloo' or 'mpi'"),
        (OnFabric, {"elastic": "10.0.0.1:29510"}, r"write HierarchicalStrategy\(elastic=\.\.\.\)"),
        (OnFabric, {"batches": HeterogeneousBatches(8)}, r"write HierarchicalStrategy\(batches=\.\.\.\)"),
        (OnFabric, {"health": Health(hang_timeout=60)}, r"write HierarchicalStrategy\(health=\.\.\.\)"),
    ],
)
def test_a_bad_argument_is_named_before_anything_starts(made, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        made(**arguments)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("find_unused_parameter", "Did you mean 'find_unused_parameters'?"),
        ("nonsense", "It takes scheme, .*bucket_cap_mb"),
        ("sync_every", r"'sync_every': write PeriodicAveraging\(sync_every="),
        ("delay", r"write StepsDelay\(delay="),
        ("hang_timeout", r"write health=Health\(hang_timeout=\.\.\.\)$"),
        ("inter_node", r"write transport=Transport\(inter_node="),
        ("speeds", r"write batches=HeterogeneousBatches\(speeds="),
        ("transport", "transport='gloo' must be Transport"),
    ],
)
def test_a_keyword_that_is_unknown_is_refused_with_the_nearest_one(name, message):
    with pytest.raises(TypeError, match=message):
        HierarchicalStrategy(**{name: "gloo"})


@pytest.mark.parametrize("strategy", [Ours, OnFabric])
@pytest.mark.parametrize("argument", ["ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"])
def test_a_communication_hook_is_no_argument_of_the_strategy(strategy, argument):
    with pytest.raises(ValueError, match=rf"{argument} cannot be set: {strategy.__name__} owns .* `wire_dtype`"):
        strategy(**{argument: default_hooks.bf16_compress_hook})


@pytest.mark.parametrize("strategy", [Ours, OnFabric])
def test_mixed_precision_of_ddp_is_no_argument_of_the_strategy(strategy):
    strategy(mixed_precision=None)  # as LightningCLI fills it in
    with pytest.raises(ValueError, match=rf"{strategy.__name__} owns. Use precision='bf16-mixed'"):
        strategy(mixed_precision=object())


@pytest.mark.parametrize(("ending", "start_method"), [("", "popen"), ("_fork", "fork"), ("_notebook", "fork")])
@pytest.mark.parametrize(
    ("name", "scheme"), [("hierarchical", "all_reduce"), *((f"hierarchical_{s}", s) for s in SCHEMES)]
)
def test_registered_names_select_the_scheme_and_the_launcher(name, scheme, ending, start_method):
    registered = StrategyRegistry.get(name + ending)
    assert isinstance(registered.scheme, SCHEMES[scheme])
    assert registered._start_method == start_method  # noqa: SLF001


def test_names_are_registered_with_fabric():
    strategy = Fabric(accelerator="cpu", devices=1, strategy="hierarchical_daso").strategy
    assert type(strategy) is HierarchicalFabricStrategy
    assert isinstance(strategy._settings.scheme, DASO)  # noqa: SLF001


def trainer_or_fabric(made: type, **arguments: Any) -> Any:
    of_fabric, devices = made is HierarchicalFabricStrategy, arguments.pop("devices")
    return (Fabric if of_fabric else pl.Trainer)(accelerator="cpu", devices=devices, strategy=made(**arguments))


@pytest.mark.parametrize("made", [Ours, OnFabric])
@pytest.mark.parametrize(
    ("ranks_per_node", "message"), [(3, "does not divide the world of 4"), ([3, 2], "adds up to 5")]
)
def test_ranks_per_node_must_fit_the_world_before_processes_are_started(made, ranks_per_node, message):
    with pytest.raises(ValueError, match=message):
        trainer_or_fabric(made, devices=4, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize("made", [Ours, OnFabric])
@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("glo", r"torch has no backend 'glo'\. Did you mean 'gloo'\?"),
        ("cpu:gloo,cuda:ncl", r"torch has no backend 'ncl'\. Did you mean 'nccl'\?"),
        ("telepathy", r"no backend 'telepathy'\. Use 'gloo', .*, or leave it out\."),
        ("cuda:gloo", "does not support cpu tensors"),
        ("nccl", "does not support cpu tensors|built without 'nccl'"),
    ],
)
def test_an_unavailable_backend_is_refused_before_processes_start(made, backend, message):
    with pytest.raises(ValueError, match=f"^process_group_backend={backend!r}.*{message}"):
        trainer_or_fabric(made, devices=2, process_group_backend=backend)


@pytest.mark.parametrize("backend", [None, "gloo", "GLOO", "cpu:gloo,cuda:nccl"])
def test_a_backend_that_torch_has_is_taken(backend):
    pl.Trainer(accelerator="cpu", devices=2, strategy=HierarchicalStrategy(process_group_backend=backend))


@pytest.mark.parametrize(
    ("arguments", "devices", "shown"),
    [
        ({}, 2, "AllReduce()"),
        ({"scheme": "diloco", "ranks_per_node": 2}, 4, "DiLoCo(sync_every=100), ranks_per_node=2"),
        ({"ranks_per_node": [3, 1]}, 4, "AllReduce(), ranks_per_node=[3, 1]"),
        (
            {"wire_dtype": "int8", "checkpoint_replicas": True, "batches": HeterogeneousBatches(64, weighting="speed")},
            1,
            "AllReduce(), wire_dtype='int8', "
            "batches=HeterogeneousBatches(global_batch_size=64, weighting='speed'), checkpoint_replicas=True",
        ),
    ],
)
def test_a_trainer_prints_its_strategy_as_one_would_write_it(arguments, devices, shown):
    trainer = pl.Trainer(accelerator="cpu", devices=devices, strategy=HierarchicalStrategy(**arguments), logger=False)
    assert repr(trainer.strategy) == f"HierarchicalStrategy({shown})"


def test_a_fabric_strategy_prints_as_one_would_write_it():
    shown = "HierarchicalFabricStrategy(DiLoCo(sync_every=100), ranks_per_node=2, wire_dtype='int4')"
    assert repr(HierarchicalFabricStrategy("diloco", 2, wire_dtype="int4")) == shown


@pytest.mark.parametrize("strategy", [HierarchicalModelParallelStrategy, HierarchicalFabricStrategy])
def test_shared_arguments_have_equal_types_defaults_and_descriptions(strategy):
    first, whole = inspect.signature(HierarchicalStrategy).parameters, inspect.getdoc(HierarchicalStrategy.__init__)
    for name, parameter in inspect.signature(strategy).parameters.items():
        if name in first and name != "kwargs":
            assert (parameter.annotation, parameter.default) == (first[name].annotation, first[name].default)
            entry = re.search(rf"    {name}: .*?(?=\n    (?! )|\n\n)", whole, re.DOTALL)
            assert entry.group() in inspect.getdoc(strategy.__init__)


@pytest.mark.parametrize(
    ("strategy", "others"),
    [
        (HierarchicalStrategy, set()),
        (HierarchicalModelParallelStrategy, {"tensor_parallel_size"}),
        (HierarchicalFabricStrategy, set()),
    ],
)
def test_every_argument_of_a_strategy_is_a_setting(strategy, others):
    arguments = set(inspect.signature(strategy).parameters) - {"kwargs"}
    assert arguments - {field.name for field in dataclasses.fields(Settings)} == others


def test_raw_bfloat16_casts_the_parameters_themselves():
    assert Settings(PeriodicAveraging(), wire_dtype="raw_bfloat16").wire == Wire("bfloat16", raw=True)


def test_settings_have_the_defaults_of_the_constructor():
    signature = inspect.signature(HierarchicalStrategy).parameters
    for field in dataclasses.fields(Settings)[1:]:
        assert field.default == (signature[field.name].default or field.default)


@pytest.mark.parametrize(
    ("kind", "cpu", "strategy"),
    [
        (pl.Trainer, of_trainer.CPUAccelerator, HierarchicalStrategy),
        (pl.Trainer, of_trainer.CPUAccelerator, HierarchicalModelParallelStrategy),
        (Fabric, of_fabric.CPUAccelerator, HierarchicalFabricStrategy),
    ],
)
def test_another_accelerator_is_refused_with_the_remedy(kind, cpu, strategy):
    devices = staticmethod(lambda devices: [torch.device("xpu", 0)])
    xpus = type("Xpus", (cpu,), {"get_parallel_devices": devices})()
    with pytest.raises(ValueError, match=r"'xpu' devices.*accelerator='gpu'.*accelerator='cpu'"):
        kind(accelerator=xpus, devices=1, strategy=strategy())

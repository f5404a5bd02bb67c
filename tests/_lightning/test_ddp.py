"""Torch's DDP, and Lightning's use of it: buckets, buffers, hooks and messages."""

from __future__ import annotations

import copy
import inspect
import pickle
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from _lightning.conftest import boring
from lightning.fabric import Fabric
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hiercomm._lightning.ddp import (
    FabricSyncControl,
    SettledDDP,
    Unshared,
    explain_unused_parameters,
    in_ddp,
    register_bucket_hook,
    time_buffer_broadcasts,
)


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


def test_ddp_strategy_takes_any_keyword_and_ddp_only_its_own():
    assert inspect.signature(DDPStrategy).parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    assert {"process_group", "device_mesh", "output_device", "dim", "find_unused_parameters"} <= known.keys()
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in known.values())


def test_unused_parameters_are_recognised_by_ddps_own_words():
    source = inspect.getsource(DDPStrategy.on_exception)
    assert "Expected to have finished reduction in the prior iteration" in source
    error = RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one. This")
    module = nn.ModuleDict({"used": nn.Linear(1, 1), "unused": nn.Linear(1, 1)})
    module["used"](torch.ones(1)).backward()
    explain_unused_parameters(error, module)
    assert "training_step: unused.weight, unused.bias. If" in str(error)
    assert "`strategy=HierarchicalStrategy(find_unused_parameters=True)`" in str(error)
    other = RuntimeError("something else")
    explain_unused_parameters(other, module)
    assert str(other) == "something else"


def _buckets_of_two_steps(wrap, **arguments):
    """Places of the parameters of each bucket, in two steps of layers whose parameters are of 1 MB in all but one."""
    module = nn.Sequential(nn.Linear(2, 600), *(nn.Linear(600, 600, bias=False) for _ in range(3)))
    places = {id(parameter): place for place, parameter in enumerate(module.parameters())}
    model, steps = wrap(module, **arguments), []

    def reduce(bucket):
        steps[-1].append([places[id(each)] for each in bucket.parameters()])
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


def test_an_unshared_module_has_what_programs_call_on_ddp(process_group):
    module = nn.Linear(2, 1)
    ddp, ours = DistributedDataParallel(module), Unshared(module)
    assert ours.module is module
    assert ours.state_dict().keys() == ddp.state_dict().keys()
    with ours.no_sync(), ours.join():
        assert torch.equal(ours(torch.ones(1, 2)), module(torch.ones(1, 2)))
    assert ours.weight is module.weight, "to programs of one rank, it is the module"
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'missing'"):
        ours.missing  # noqa: B018
    assert torch.equal(pickle.loads(pickle.dumps(ours)).weight, module.weight)
    assert type(copy.deepcopy(ours)) is type(copy.deepcopy(SettledDDP(module))) is nn.Linear


def test_a_training_step_goes_through_the_forward_of_its_ddp(process_group):
    module, batch, calls = boring(training_step=lambda self, batch, batch_idx: self.layer(batch)), torch.ones(1, 32), []
    for wrapped in (DistributedDataParallel(module), Unshared(module)):
        hooks = [each.register_forward_hook(lambda of, *_: calls.append(type(of))) for each in (wrapped, module)]
        output = DDPStrategy()._forward_redirection(wrapped, module, "training_step", batch, batch_idx=0)
        assert torch.equal(output, module.layer(batch))
        assert calls == [type(module), type(wrapped)]
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


class Tells(nn.Module):
    """Names what DDP is to ignore in its class."""

    _ddp_params_and_buffers_to_ignore = ("bank",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("bank", torch.zeros(3))
        self.register_buffer("other", torch.zeros(3))


def test_names_of_a_class_are_ignored_with_further_ones(process_group):
    module = Tells()
    assert in_ddp(module, None, {}, settled=False, ignored={"other"}).parameters_to_ignore == {"bank", "other"}
    assert module._ddp_params_and_buffers_to_ignore == ("bank",)

"""What DDP ignores is found under all names, as DDP finds it."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hiercomm.nodes.ignored import ignored_by_ddp


def tied() -> nn.Module:
    module = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2)})
    module["two"].weight = module["one"].weight
    return module


def test_a_module_that_names_nothing_has_nothing_ignored():
    assert ignored_by_ddp(tied()) == set()


def test_torchs_own_setter_names_parameters_and_buffers():
    module = tied()
    names = ["two.bias", "norm.running_mean", "missing"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # noqa: SLF001
    assert ignored_by_ddp(module) == {"two.bias", "norm.running_mean"}


def test_the_first_name_of_a_tied_parameter_counts_as_in_ddp(process_group):
    for names, ignored in ((["one.weight"], {"one.weight", "two.weight"}), (["two.weight"], set())):
        module = tied()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # noqa: SLF001
        assert ignored_by_ddp(module) == ignored

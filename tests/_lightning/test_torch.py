"""What torch does with DTensors, the profiler, and versions of tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_hiercomm.comm.dtensor import fully_sharded_modules, local
from lightning_hiercomm.comm.torch import unprofiled


@pytest.fixture
def sharded(process_group):
    """``sharded(layer)``: a layer that FSDP2 shards over this rank."""
    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("torch has it there from 2.6 on")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
    return lambda layer: torch.distributed.fsdp.fully_shard(layer, mesh=mesh)


def test_a_dtensors_local_tensor_is_always_the_same_one(sharded):
    layer = sharded(nn.Linear(3, 2))
    assert fully_sharded_modules(nn.Sequential(layer, nn.ReLU())) == [layer]
    held = local(layer.weight)
    assert held is local(layer.weight)
    assert held.data_ptr() == layer.weight.to_local().data_ptr()
    layer(torch.ones(1, 3)).sum().backward()
    layer.reshard()
    with torch.no_grad():
        held.fill_(7.0)
    assert layer.weight.full_tensor().tolist() == [[7.0] * 3] * 2


def test_fsdp2_goes_on_with_gathered_parameters_until_it_reshards(sharded):
    layer = sharded(nn.Linear(1, 1, bias=False))
    held = local(layer.weight)
    with torch.no_grad():
        layer(torch.ones(1, 1))  # the root stays gathered after it
        held.fill_(7.0)
        fully_sharded_modules(layer)[0].reshard()
        assert layer(torch.ones(1, 1)).item() == 7.0


def test_the_profiler_can_be_kept_from_recording():
    with torch.profiler.profile() as profile:
        with unprofiled():
            torch.ones(2).mul(2)
        torch.ones(2).add(2)
    names = {event.name for event in profile.events()}
    assert "aten::add" in names
    assert "aten::mul" not in names

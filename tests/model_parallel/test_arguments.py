"""What cannot work is refused before training, with a remedy."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from model_parallel.conftest import trainer
from model_parallel.sharded import Net
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_hiercomm import (
    DASO,
    HierarchicalModelParallelStrategy,
    ParameterSync,
    StepsDelay,
)
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.trainer.model_parallel import _mesh_of_world


def test_a_torch_that_cannot_slice_the_mesh_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.8.0+cu128")
    with pytest.raises(RuntimeError, match=r"needs torch 2\.9 or newer"):
        HierarchicalModelParallelStrategy()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": StepsDelay()}, "StepsDelay keeps the model on servers of its own: use HierarchicalStrategy"),
        ({"scheme": "steps_delay"}, "StepsDelay keeps the model on servers"),
        ({"scheme": DASO()}, "sends the whole model from one rank.* use reducer='sharded'"),
        ({"scheme": ParameterSync(reducer="leader")}, "use reducer='sharded'"),
        ({"scheme": "telepathy"}, "scheme='telepathy' is unknown"),
        ({"tensor_parallel_size": "all"}, "tensor_parallel_size='all' must be a positive number"),
    ],
)
def test_bad_arguments_are_named_before_anything_starts(arguments, message):
    with pytest.raises(ValueError, match=message):
        HierarchicalModelParallelStrategy(**arguments)


@pytest.mark.parametrize("argument", ["elastic", "batches", "average_optimizer_state", "unequal_data"])
def test_arguments_for_whole_parameters_are_refused(argument):
    with pytest.raises(TypeError, match=rf"write HierarchicalStrategy\({argument}=\.\.\.\)"):
        HierarchicalModelParallelStrategy(**{argument: None})


@pytest.mark.parametrize(
    ("nodes", "sizes", "message"),
    [
        ([[0, 1], [2]], {}, "the nodes have 1 or 2 ranks.* use nodes of equal size, or HierarchicalStrategy"),
        ([[0, 1], [2, 3]], {"tensor_parallel_size": 3}, "must be the 2 ranks of a node"),
        ([[0, 1], [2, 3]], {"data_parallel_size": 4}, "data_parallel_size=4 times .* must be the 2"),
    ],
)
def test_nodes_that_do_not_fit_the_mesh_are_refused(nodes, sizes, message):
    def work(rank, world):
        meter = Meter()
        HierarchicalModelParallelStrategy(**sizes).make_mesh(Topology(nodes, rank, world.connect(rank, meter), meter))

    with pytest.raises(ValueError, match=message):
        ThreadWorld(sum(map(len, nodes))).run(work)


def test_the_strategy_is_registered_by_name():
    assert "hierarchical_model_parallel" in StrategyRegistry
    strategy = pickle.loads(pickle.dumps(HierarchicalModelParallelStrategy("daso")))
    assert isinstance(strategy, ModelParallelStrategy)
    assert strategy.scheme.reducer == "sharded"


class OtherMesh(Net):
    """Shards itself over a mesh of its own making."""

    def shard(self) -> None:
        fully_shard(self.net, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("mine",)))


@pytest.mark.parametrize(
    ("module", "callbacks", "message"),
    [
        (OtherMesh, [], "distributed over the mesh .*mine.*: apply parallelism to self.device_mesh"),
        (Net, [WeightAveraging], "WeightAveraging needs whole parameters on every rank"),
    ],
)
def test_modules_and_callbacks_that_cannot_be_followed_are_refused(module, callbacks, message, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    run = trainer(
        HierarchicalModelParallelStrategy(), 1, callbacks=[make() for make in callbacks], default_root_dir=tmp_path
    )
    with pytest.raises(ValueError, match=message):
        run.fit(module(replicas=1))


def test_one_rank_trains_alone(launch):
    def train(folder: Path) -> list[float]:
        module = Net(replicas=1)
        trainer(HierarchicalModelParallelStrategy("diloco"), 1, default_root_dir=folder).fit(module)
        return module.report

    # in a process of its own: FSDP2's backward starts threads that no later test could fork
    (losses,) = launch(train, ranks=1)
    assert losses[-1] < losses[0]
    assert all(map(math.isfinite, losses))


def test_gloo_groups_are_not_split_from_a_gpu_group(launch):
    """torch splits the default group there, whatever its backend, and cannot copy gloo's options."""
    assert launch(mesh_on_a_gpu, ranks=2) == [[0], [1]]


def mesh_on_a_gpu(folder: Path) -> list[int]:
    torch.cuda.is_available = lambda: True
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    dist.distributed_c10d._get_default_group().bound_device_id = torch.device("cuda", 0)
    mesh = _mesh_of_world("cpu", torch.tensor([[[0]], [[1]]]))
    try:
        dist.all_reduce(torch.zeros(1))  # or rank 0 is gone, and its store with it, while the other makes its group
        return dist.get_process_group_ranks(mesh["data_parallel"].get_group())
    finally:
        dist.destroy_process_group()

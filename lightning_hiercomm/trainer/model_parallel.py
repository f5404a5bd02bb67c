"""HierarchicalModelParallelStrategy: FSDP2 or tensor parallelism inside the node, a scheme between nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hiercomm._lightning.trainer import accumulates, raw_optimizer
from lightning_hiercomm._lightning.tree import pl
from lightning_hiercomm.checkpoints.sharded import (
    held_by,
    load_optimizers,
    load_sharded_state,
    renumbered,
    save_directory,
    whole_on_rank_zero,
)
from lightning_hiercomm.comm.dtensor import local
from lightning_hiercomm.comm.torch import torch_version, without_splitting_gloo
from lightning_hiercomm.nodes.ignored import ignored_by_ddp
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import broadcast_values, trained_by
from lightning_hiercomm.run.sharded_gradients import ShardedGradients
from lightning_hiercomm.run.shards import reshard
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import DASO, SCHEMES, Scheme, SchemeName
from lightning_hiercomm.schemes.gradient_path import GradientPath, InterNodeMean, LocalGradients
from lightning_hiercomm.schemes.optimizer_state import is_placeholder
from lightning_hiercomm.trainer.hooks import HierarchicalHooks
from lightning_hiercomm.trainer.options import Health, Transport
from lightning_hiercomm.trainer.settings import SHARDED, Settings, WireDtype, check_keywords, described_like
from lightning_hiercomm.trainer.strategy import HierarchicalStrategy

_DIMENSIONS = ("data_parallel", "tensor_parallel")
_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def _mesh_of_world(device: str, ranks: Tensor) -> DeviceMesh:
    """Return a mesh over the world, of ranks by node, data parallel and tensor parallel index.

    Making a mesh is collective over the world, and its process groups are never closed, so each layout is made once.
    """
    world = dist.group.WORLD
    for other in [key for key in _meshes if key[0] is not world]:  # the process group was destroyed
        del _meshes[other]
    key = (world, device, str(ranks.tolist()))
    if key not in _meshes:
        with without_splitting_gloo():
            _meshes[key] = DeviceMesh(device, ranks, mesh_dim_names=("node", *_DIMENSIONS))
    return _meshes[key]


_SCHEMES: Mapping[str, Callable[[], Scheme]] = {**SCHEMES, "daso": partial(DASO, reducer="sharded")}


class HierarchicalModelParallelStrategy(HierarchicalHooks, pl.strategies.ModelParallelStrategy):
    """Train a module that is sharded inside each node, on nodes joined by a network much slower than their own links.

    Nodes of eight GPUs, over which FSDP2 shards the module, exchange parameters every 100 steps::

        from lightning_hiercomm import DiLoCo, HierarchicalModelParallelStrategy

        strategy = HierarchicalModelParallelStrategy(DiLoCo(sync_every=100))
        trainer = Trainer(strategy=strategy, devices=8, num_nodes=4)

    The module shards itself in ``configure_model`` over ``self.device_mesh``, with FSDP2's ``fully_shard``, a tensor
    parallel plan, or both, as for Lightning's ``ModelParallelStrategy``. Here the mesh is that of the *node*, with the
    dimensions ``data_parallel`` and ``tensor_parallel``. Ranks that hold the same shard on different nodes synchronize
    it by the scheme, without gathering the parameters. Validation and checkpoints use the averaged model, as with
    ``HierarchicalStrategy``.

    With ``AllReduce`` nodes average their gradients during each backward pass, which is hybrid sharding. Gradients are
    clipped by the norm over the node, or, with ``AllReduce``, over all nodes.

    All nodes begin with node 0's values, shard by shard, so no rank ever holds a whole module from the meta device.
    The same applies to values that the module writes in ``on_fit_start`` or ``on_train_start``.

    ``scheme="daso"`` is ``DASO(reducer="sharded")``.

    Raises:
        ValueError: If the scheme needs whole parameters on every rank: ``StepsDelay``, ``DASO(reducer="leader")``.
    """

    strategy_name = "hierarchical_model_parallel"

    @described_like(HierarchicalStrategy.__init__)
    def __init__(  # noqa: D417 - described_like adds the others
        self,
        scheme: Scheme | SchemeName = "all_reduce",
        ranks_per_node: int | list[int] | None = None,
        wire_dtype: WireDtype | None = None,
        average_buffers: bool | list[str] = True,
        checkpoint_replicas: bool = False,
        health: Health = Health(),
        transport: Transport = Transport(),
        tensor_parallel_size: Literal["auto"] | int = 1,
        **kwargs: Any,
    ) -> None:
        """Check the arguments.

        Args:
            tensor_parallel_size: Ranks of a node that share a layer. ``"auto"``: all. FSDP2 shards over those that this
                leaves.
            **kwargs: Other arguments of Lightning's ``ModelParallelStrategy``, such as
                ``save_distributed_checkpoint``: by default the ranks of node 0 write their shards to a directory;
                False is one file, put together by rank 0, which any strategy loads.

        Raises:
            ValueError: If an argument has no possible value, or contradicts another one.
            TypeError: If an argument has a wrong type or is unknown.
            RuntimeError: With a torch older than 2.9.
        """
        if torch_version() < (2, 9):
            raise RuntimeError(
                f"{type(self).__name__} needs torch 2.9 or newer, which can slice a node's mesh; this is torch"
                f" {torch.__version__}. Install a newer torch, or use HierarchicalStrategy"
            )
        check_keywords(type(self), kwargs)
        self._settings = Settings.of(_SCHEMES, locals(), SHARDED)
        if tensor_parallel_size != "auto" and (not isinstance(tensor_parallel_size, int) or tensor_parallel_size < 1):
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size!r} must be a positive number of ranks, or 'auto'"
            )
        super().__init__(tensor_parallel_size=tensor_parallel_size, **kwargs)
        self._configure()
        self._gradients: ShardedGradients | None = None
        self._averages_in_step = False

    # ---- setting up ----------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        callbacks = self._module.trainer.callbacks  # type: ignore[attr-defined]  # set, but not declared
        if any(isinstance(callback, pl.callbacks.WeightAveraging) for callback in callbacks):
            raise ValueError(
                f"WeightAveraging needs whole parameters on every rank, but {type(self).__name__} shards them: leave"
                " the callback out"
            )
        super().setup_environment()
        self.make_mesh(self._topology)

    def make_mesh(self, topology: Topology) -> None:
        """Make the node's mesh, as a slice of one over the world, and set the module's ``device_mesh``. Collective.

        Raises:
            ValueError: If the nodes have unequal sizes, or do not fit the sizes of the mesh.
        """
        sizes = sorted({len(ranks) for ranks in topology.nodes})
        if len(sizes) > 1:
            raise ValueError(
                f"the nodes have {' or '.join(map(str, sizes))} ranks, but {type(self).__name__} synchronizes ranks"
                " with the same shard of the model: use nodes of equal size, or HierarchicalStrategy"
            )
        ranks = sizes[0]
        tensor_parallel = ranks if self._tensor_parallel_size == "auto" else self._tensor_parallel_size
        data_parallel = ranks // tensor_parallel if self._data_parallel_size == "auto" else self._data_parallel_size
        if data_parallel * tensor_parallel != ranks:
            raise ValueError(
                f"data_parallel_size={self._data_parallel_size} times tensor_parallel_size={self._tensor_parallel_size}"
                f" must be the {ranks} ranks of a node: data_parallel_size='auto' is what tensor_parallel_size leaves"
            )
        meshes = torch.tensor(topology.nodes).view(-1, data_parallel, tensor_parallel)
        if self._device_mesh is None:  # parameters of an earlier fit use the mesh of that time
            self._device_mesh = _mesh_of_world(self.root_device.type, meshes)[_DIMENSIONS]
        module = self.lightning_module
        assert module is not None
        module._device_mesh = self._device_mesh  # `module.device_mesh` returns it in `configure_model`
        if data_parallel > 1 and tensor_parallel > 1:
            topology.divide(
                {
                    "data_parallel": meshes.transpose(1, 2).reshape(-1, data_parallel).tolist(),
                    "tensor_parallel": meshes.reshape(-1, tensor_parallel).tolist(),
                }
            )

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The dimensions of the node's mesh and their sizes."""
        return dict(zip(_DIMENSIONS, self.device_mesh.mesh.shape, strict=True))

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        in_node = self.device_mesh["data_parallel"]
        nodes, node = (1, 0) if self.topology is None else (self.topology.num_nodes, self.topology.node)
        return {
            "num_replicas": nodes * in_node.size(),
            "rank": node * in_node.size() + in_node.get_local_rank(),
        }

    @override
    def _start_process(self) -> None:
        self._setup_distributed()  # without the mesh over the world

    @override
    def model_to_device(self) -> None:
        if names := ignored_by_ddp(self._module):
            raise ValueError(
                f"{', '.join(sorted(names)[:3])}: the module tells DDP to leave them to each rank"
                f" (_ddp_params_and_buffers_to_ignore), but {type(self).__name__} does not use DDP, and makes all nodes"
                " equal: leave the attribute out, or use HierarchicalStrategy"
            )
        super().model_to_device()
        self._begin_equal()

    @override
    def _begin_equal(self) -> None:
        reshard(self._module)
        super()._begin_equal()

    @override
    def _broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast node 0's values of tensors to all nodes, shard by shard. Collective."""
        topology = self._topology
        reshard(self._module)
        if topology.inter is not None:
            broadcast_values([local(tensor) for tensor in tensors if local(tensor) is not tensor], topology.inter)
        broadcast_values([tensor for tensor in tensors if local(tensor) is tensor], topology.world)

    @override
    def _new_run(self, mesh: Mapping[str, int] | None = None, gradients: GradientPath | None = None) -> TrainingRun:
        topology, gradients = self._topology, LocalGradients()
        if self.scheme.gradients == "world" and topology.num_nodes > 1:
            gradients = InterNodeMean(topology, self.wire, self._module.parameters())
        run = super()._new_run(self.mesh_sizes, gradients)
        group = topology.inter if isinstance(gradients, InterNodeMean) else None
        if group is not None and not self._module.automatic_optimization:
            run.misuse.gradient_group = group
        return run

    # ---- gradients between nodes ---------------------------------------------------------------------------------

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(self._run.gradients, InterNodeMean) or not self._module.automatic_optimization:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        gradients = self._gradients_of(trained_by(raw_optimizer(optimizer)))

        def backward() -> Any:  # before clipping, and at the end of accumulation
            self._averages_in_step = True
            try:
                with gradients.backward():
                    return closure()
            finally:
                self._averages_in_step = False

        return super().optimizer_step(optimizer, backward, model, **kwargs)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if not isinstance(self._run.gradients, InterNodeMean) or self._averages_in_step:
            return
        if not accumulates(self._module.trainer):
            # gradients that were averaged before, and accumulated since, do not change when they are averaged again
            self._gradients_of(p for optimizer in self._run.optimizers for p in trained_by(optimizer)).average()

    def _gradients_of(self, parameters: Iterable[Tensor]) -> ShardedGradients:
        """Return the object that averages these parameters' gradients; a new one if the parameters have changed."""
        parameters, known = list(dict.fromkeys(parameters)), self._gradients
        if known is None or list(map(id, known.parameters)) != list(map(id, parameters)):
            if known is not None:
                known.close()
            path = self._run.gradients
            assert isinstance(path, InterNodeMean)
            known = ShardedGradients(parameters, path, self._topology, self.mesh_sizes, self._settings.bucket_bytes)
            self._gradients = known
        return known

    @override
    def teardown(self) -> None:
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None
        super().teardown()

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    @override
    def _write(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if storage_options is None and not self._save_distributed_checkpoint:
            whole_on_rank_zero(checkpoint, self.global_rank)
            # Lightning's lets all ranks remove at once, and before it writes, a directory whose place the file takes
            super()._write(checkpoint, filepath)
        elif storage_options is None and self.topology is not None:
            save_directory(checkpoint, Path(self.broadcast(filepath)), self.topology)
        else:
            pl.strategies.ModelParallelStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        raw = raw_optimizer(optimizer)
        if is_placeholder(raw):
            return {}  # torch would search the module for its parameters
        state = pl.strategies.ModelParallelStrategy.optimizer_state(self, optimizer)
        if self._save_distributed_checkpoint or self.global_rank != 0:
            return state
        return renumbered(state, raw, before=list(self._module.parameters()), after=held_by(raw))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        optimizers, self._optimizers = self._optimizers, []
        try:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        finally:
            self._optimizers = optimizers
        reshard(self._module)
        if self._is_fitting:
            run, path = self._run, Path(self.broadcast(checkpoint_path))
            run.begin_from_module()
            trained = self._checkpoints.loaded.get("trained")
            with run.scheme_states.training(trained):  # torch omits the states of frozen ones
                states = checkpoint.pop("optimizer_states", [])
                if run.optimizers:
                    load_optimizers(path, states, self._module, run.optimizers, self._module.strict_loading)
                load_sharded_state(checkpoint, path, run.optimizers)
                self._checkpoints.restore(run)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: :meth:`load_checkpoint` restores optimizers."""

"""HierarchicalFabricStrategy: a scheme between nodes for a program's own training loop, on Lightning Fabric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hiercomm._lightning.ddp import FabricSyncControl, is_not_insisted_on
from lightning_hiercomm._lightning.launcher import place_of, settle_as_fork
from lightning_hiercomm._lightning.tree import as_shown, fabric, pass_to_ranks
from lightning_hiercomm.nodes.connect import connect_world, process_group
from lightning_hiercomm.nodes.interfaces import use_reachable_interface
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run import traffic
from lightning_hiercomm.run.losses import common_loss
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import SCHEMES, RunningScheme, Scheme, SchemeName
from lightning_hiercomm.schemes.optimizer_state import evaluates_loss
from lightning_hiercomm.trainer.fabric_loop import FabricLoop, FabricModule
from lightning_hiercomm.trainer.options import Transport
from lightning_hiercomm.trainer.settings import (
    WITHOUT_TRAINER,
    Settings,
    WireDtype,
    check_ddp_arguments,
    check_keywords,
    described_like,
)
from lightning_hiercomm.trainer.strategy import HierarchicalStrategy


class HierarchicalFabricStrategy(fabric.strategies.ddp.DDPStrategy):
    """Train by a loop of your own, on ``lightning.fabric.Fabric``, as ``HierarchicalStrategy`` does with a ``Trainer``.

    Example::

        strategy = HierarchicalFabricStrategy(DASO(warmup=Epochs(1), cooldown=Epochs(1)))
        fabric = Fabric(strategy=strategy, devices=4, num_nodes=2)
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(loader)
        for epoch in strategy.epochs(10):
            for batch in loader:
                fabric.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            with strategy.averaged_model():
                validate(model)
        fabric.save("last.ckpt", {"model": model, "optimizer": optimizer, "schedule": strategy})

    Iterate over :meth:`epochs`, because a strategy cannot find out where a loop begins and ends. Until its end the
    ranks hold different parameters. Validate inside :meth:`averaged_model`; ``fabric.save`` saves the averaged
    parameters. All of these are collective: every rank calls them, like ``fabric.save``.

    The strategy in the saved dictionary is optional. It adds the schemes' schedule: the steps taken, DASO's plateau,
    the outer optimizer's state. Load it in the same way, with ``fabric.load``, before :meth:`epochs`.

    The constructor's arguments are those of ``HierarchicalStrategy`` that need no Trainer, and all of Fabric's
    ``DDPStrategy``. Without the Trainer's control plane, ranks that wait for one that died end by the process group's
    timeout.

    Attributes:
        topology: The nodes; None before ``fabric.launch``.
    """

    @described_like(HierarchicalStrategy.__init__)
    def __init__(  # noqa: D417 - described_like adds the others
        self,
        scheme: Scheme | SchemeName = "all_reduce",
        ranks_per_node: int | list[int] | None = None,
        wire_dtype: WireDtype | None = None,
        average_buffers: bool | list[str] = True,
        average_optimizer_state: bool = False,
        transport: Transport = Transport(),
        **kwargs: Any,
    ) -> None:
        """Check the arguments, and pass all others to Fabric's strategy.

        Args:
            **kwargs: Arguments of Fabric's ``DDPStrategy``, and of ``DistributedDataParallel``, such as
                ``find_unused_parameters`` and ``gradient_as_bucket_view``.

        Raises:
            ValueError: If an argument has no possible value, or contradicts another one.
            TypeError: If an argument has a wrong type or is unknown.
        """
        check_keywords(type(self), kwargs, check_ddp_arguments(kwargs, type(self).__name__))
        self._settings = Settings.of(SCHEMES, locals(), WITHOUT_TRAINER)
        super().__init__(**kwargs)
        self._backward_sync_control = FabricSyncControl()
        self.topology: Topology | None = None
        self._starts_ranks = False
        self._loop = FabricLoop()
        self._is_saving = False

    def __deepcopy__(self, memo: object) -> HierarchicalFabricStrategy:
        """Return the strategy itself: users copy the modules that refer to it, for an average of the weights."""
        return self

    def __repr__(self) -> str:
        """The strategy as a user writes it."""
        return as_shown(f"{type(self).__name__}({self._settings.as_written()})")

    # ---- a program's loop ----------------------------------------------------------------------------------------

    def epochs(self, count: int, first: int = 0, steps: int | None = None) -> Iterator[int]:
        """Iterate over the numbers of epochs, and begin and end each epoch, and the run, in the schemes.

        After the last epoch training is over, and every rank holds the averaged parameters. After a ``break`` this
        happens when :meth:`finish` is called, or another loop begins.

        Args:
            count: Epochs of the whole run.
            first: The epoch at which a resumed run continues.
            steps: Optimizer steps of an epoch, if known. Then schemes leave out an exchange that the end of the epoch
                makes useless, and may count the steps to the end of the run.

        Returns:
            ``first``, ..., ``count - 1``.
        """
        return self._loop.run(count, first, steps)

    @contextmanager
    def averaged_model(self) -> Iterator[None]:
        """Inside, every rank's modules hold the averaged parameters; afterwards each rank's own again. Collective."""
        with ExitStack() as stack:
            for module in self._loop.modules:
                stack.enter_context(module.averaged_model())
            yield

    def finish(self) -> None:
        """End training, with the averaged parameters on every rank; for loops without :meth:`epochs`. Collective."""
        self._loop.finish()

    def communication(self) -> dict[str, float]:
        """Return this rank's counters and the schemes' scalars; see ``HierarchicalStrategy.communication``."""
        return traffic.communication(None if self.topology is None else self.topology.meter, self.schemes, None)

    @property
    def runs(self) -> list[TrainingRun]:
        """The runs of the modules that have an optimizer."""
        return self._loop.runs

    @property
    def schemes(self) -> list[RunningScheme[Scheme]]:
        """One per optimizer, in the order of ``fabric.setup``."""
        return [scheme for run in self.runs for scheme in run.schemes]

    @property
    def node_process_group(self) -> dist.ProcessGroup | None:
        """The process group of this node's ranks, which hold equal parameters, for programs that communicate.

        Optimizers such as ``ZeroRedundancyOptimizer`` take it as ``process_group``. It exists after ``fabric.launch``.
        """
        return process_group(self._topology.intra)

    # ---- setting up ----------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        pass_to_ranks()
        self._settings.check_launch(self.parallel_devices, self._process_group_backend, self.world_size)
        assert self.cluster_environment is not None
        self._starts_ranks = not self.cluster_environment.creates_processes_externally
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        settle_as_fork(self._start_method)  # the first thing that a rank does
        assert self.cluster_environment is not None
        if self.world_size > 1 and not dist.is_initialized():
            use_reachable_interface(self.cluster_environment.main_address)
        super().setup_environment()
        place = place_of(self.cluster_environment, self.node_rank, self.local_rank, self._starts_ranks)
        sizes, inter_node = self._settings.ranks_per_node, self._settings.transport.inter_node
        self.topology = connect_world(self.global_rank, self.world_size, place, sizes, inter_node, self._timeout)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}  # nodes may have unequal numbers of ranks

    @override
    def setup_module(self, module: nn.Module) -> Any:
        """Set up a module whose optimizer comes later, by ``fabric.setup_optimizers``, or never."""
        return self._add(module).wrap(self._ddp_kwargs, self._determine_ddp_device_ids())

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Any:
        """Set up the optimizer of a module that ``fabric.setup_module`` has set up."""
        self._loop.start_run(self._loop.module_of(optimizer), [optimizer])
        return optimizer

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Any, list[Optimizer], Any]:
        own = self._add(module)
        self._loop.start_run(own, optimizers)
        return own.wrap(self._ddp_kwargs, self._determine_ddp_device_ids()), optimizers, scheduler

    def _add(self, module: nn.Module) -> FabricModule:
        own = FabricModule(module, self._settings, self._topology, self.root_device)
        self._loop.modules.append(own)
        return own

    # ---- training ------------------------------------------------------------------------------------------------

    @override
    @is_not_insisted_on
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        self._loop.keep_loss(tensor)
        for run in self.runs:
            run.note_loss_scale(self.precision)
        super().backward(tensor, module, *args, **kwargs)
        for run in self.runs:
            run.gradients.end_backward(self._topology.meter, self.root_device)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        self._loop.begin_if_needed()
        for module in self._loop.modules:
            module.check_trained()
        step, run, closure = super().optimizer_step, self._loop.run_of(optimizer), kwargs.get("closure")
        last = run.scheme_of(optimizer).state.step_in_epoch + 1 == self._loop.steps_of_epoch
        if closure is None:
            self._loop.add_losses(run, type(self))
        elif evaluates_loss(optimizer):
            kwargs["closure"] = lambda: common_loss(closure(), run.topology, run.gradients_over)
        result = run.step(optimizer, lambda: step(optimizer, **kwargs), last=last)
        if closure is not None:  # which has called fabric.backward
            self._loop.add_losses(run, type(self))
        return result

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.averaged_model():
            self._is_saving = True
            try:
                super().save_checkpoint(*args, **kwargs)
            finally:
                self._is_saving = False

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if hasattr(optimizer, "consolidate_state_dict"):  # torch's ZeroRedundancyOptimizer, whose state Fabric gathers
            return super().get_optimizer_state(optimizer)
        only_on = 0 if self._is_saving else None  # rank 0 writes; a program may ask for it on any rank
        return self._loop.run_of(optimizer).scheme_of(optimizer).optimizer_state(only_on)

    @override
    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        if not state:  # the program only reads the file
            return rest
        read = [run for run in self.runs if _holds(state, run.module)]
        for run in read:
            run.begin_from_module()  # all ranks have read the same
        self._loop.load_modules()
        for run in read:
            run.remember_values()
        return rest

    def state_dict(self) -> dict[str, Any]:
        """Return the schemes' schedules, which are equal on all ranks, and what they train. Collective."""
        return self._loop.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` after ``fabric.load`` has read the parameters as well.

        Raises:
            ValueError: If another version of this package has saved it in another format.
        """
        self._loop.load_state_dict(state)

    @property
    def _topology(self) -> Topology:
        if self.topology is None:
            raise RuntimeError("there are no nodes yet: call fabric.launch() before fabric.setup(...)")
        return self.topology


def _holds(state: Any, module: nn.Module) -> bool:
    """Return whether a state that a file is read into contains a module, perhaps wrapped."""
    values = state.values() if isinstance(state, Mapping) else [state]
    return any(each is module for value in values if isinstance(value, nn.Module) for each in value.modules())

"""The arguments of the three strategies, checked before any process starts."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_hiercomm._lightning.collectives import collectives_of_default_group
from lightning_hiercomm.arguments import check_types, checked_fields, note_owner, unknown_argument
from lightning_hiercomm.batches import HeterogeneousBatches
from lightning_hiercomm.comm.codec import codec_named
from lightning_hiercomm.comm.mpi import load_mpi
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.elastic.configuration import Elastic
from lightning_hiercomm.nodes.connect import process_group
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import SCHEMES, Scheme, SchemeName
from lightning_hiercomm.schemes.gradients import GradientPath
from lightning_hiercomm.schemes.samples import SampleWeights
from lightning_hiercomm.trainer.elastic_refusals import check_arguments
from lightning_hiercomm.trainer.options import Health, Transport, UnequalData

ARGUMENTS_OF_SCHEMES = {
    name: scheme.__name__ for scheme in reversed(SCHEMES.values()) for name in inspect.signature(scheme).parameters
}
"""The name of each scheme's argument, with the first scheme that has it."""


WireDtype = Literal["float32", "bfloat16", "float16", "int8", "int4", "sparse2"]


@checked_fields
@dataclass(frozen=True)
class Settings:
    """The arguments of a strategy; :class:`HierarchicalArguments` documents them.

    Raises:
        ValueError: If arguments contradict each other or the scheme.
        TypeError: If an argument has a wrong type.
    """

    scheme: Scheme
    ranks_per_node: int | list[int] | None = None
    wire_dtype: WireDtype | None = None
    batches: HeterogeneousBatches | None = None
    average_buffers: bool | list[str] = True
    average_optimizer_state: bool = False
    evaluate: Literal["averaged", "replica"] = "averaged"
    checkpoint_replicas: bool = False
    health: Health = Health()
    transport: Transport = Transport()
    elastic: Elastic | None = None
    unequal_data: UnequalData | None = None

    def __post_init__(self) -> None:
        scheme, sizes = self.scheme, self.ranks_per_node
        if self.transport.inter_node == "mpi":
            load_mpi()  # Lightning's own attempt fails without naming what is missing
        if sizes is not None and min([sizes] if isinstance(sizes, int) else sizes, default=0) < 1:
            raise ValueError(f"ranks_per_node={sizes} must be a positive number, or a list of one per node")
        if self.transport.wire_raw and self.wire_dtype is None:
            raise ValueError("wire_raw=True needs a wire_dtype to cast to, such as 'bfloat16'")
        if self.transport.wire_raw and codec_named(self.wire_dtype).needs_feedback:
            raise ValueError(
                f"wire_raw=True sends parameters themselves; wire_dtype={self.wire_dtype!r} would drop most of them:"
                " leave wire_raw out, or use 'bfloat16'"
            )
        if self.average_optimizer_state and not scheme.requirements.can_average_optimizer_state:
            raise ValueError(
                f"average_optimizer_state=True does nothing with {type(scheme).__name__}, which never synchronizes all"
                " parameters at once: leave it out, or use PeriodicAveraging"
            )
        if self.unequal_data is not None:
            self._check_unequal_data(self.unequal_data)
        if self.elastic is not None:
            check_arguments(
                scheme,
                batches=self.batches,
                ranks_per_node=sizes,
                inter_node=self.transport.inter_node,
                average_optimizer_state=self.average_optimizer_state,
                checkpoint_replicas=self.checkpoint_replicas,
                evaluate=self.evaluate,
            )

    def _check_unequal_data(self, unequal: UnequalData) -> None:
        if (reason := self.scheme.requirements.needs_equal_data) is not None:
            raise ValueError(f"unequal_data: {reason}")
        if self.batches is not None:
            raise ValueError(
                "unequal_data: HeterogeneousBatches divides one dataset among all ranks: leave batches or unequal_data"
                " out"
            )
        if self.elastic is not None:
            raise ValueError(
                "unequal_data: elastic nodes divide one dataset among the nodes that are there: leave elastic or"
                " unequal_data out"
            )
        if unequal.mean == "normalized" and self.scheme.gradients == "world":
            raise ValueError(
                f"unequal_data: {type(self.scheme).__name__} averages gradients at every step, so nodes take equally"
                " many steps: use mean='weighted'"
            )

    @property
    def wire(self) -> Wire:
        """The form of inter-node traffic."""
        return Wire.named(self.wire_dtype, self.transport.wire_raw)

    @property
    def bucket_bytes(self) -> int:
        """Size of the buckets in which parameters travel."""
        return max(1, int(self.transport.bucket_mb * 2**20))

    def changed(self) -> dict[str, Any]:
        """Return the arguments that are not the default, except the scheme."""
        values = ((each.name, getattr(self, each.name), each.default) for each in fields(self)[1:])
        return {name: value for name, value, default in values if value != default}

    def as_written(self, sizes: Sequence[int] | None) -> str:
        """Return the arguments as a user writes them, with the sizes of the nodes if they are known."""
        written = {name: repr(value) for name, value in self.changed().items()}
        if sizes is not None:
            equal = len(sizes) > 8 and len(set(sizes)) == 1
            written["ranks_per_node"] = f"[{sizes[0]}] * {len(sizes)}" if equal else repr(list(sizes))
        names = sorted(written, key=lambda name: name != "ranks_per_node")
        return ", ".join([repr(self.scheme), *(f"{name}={written[name]}" for name in names)])

    def new_run(self, replicas: Replicas, topology: Topology, gradients: GradientPath | None = None) -> TrainingRun:
        """Build the module's schemes; see :class:`~lightning_hiercomm.run.training_run.TrainingRun`. Collective."""
        if self.elastic is not None:
            replicas.fix_slots()  # joining nodes build their buckets alone
        return TrainingRun(
            self.scheme,
            replicas,
            topology,
            self.wire,
            self.average_optimizer_state,
            gradients,
            on_nonfinite=self.health.on_nonfinite,
            # each elastic node has a default process group of its own
            collectives=(lambda: 0) if self.elastic is not None else collectives_of_default_group,
            samples=None if self.unequal_data is None else SampleWeights(self.unequal_data.mean == "normalized"),
        )

    def node_process_group(self, topology: Topology) -> dist.ProcessGroup | None:
        """The process group of this node's ranks.

        Raises:
            RuntimeError: If they hold different parameters.
        """
        if self.scheme.gradients == "none":
            raise RuntimeError(
                f"node_process_group: with {self.scheme!r} every rank trains a model of its own, so the ranks of a node"
                " must not share its parameters or gradients: use hierarchical=True"
            )
        return process_group(topology.intra)


note_owner("HierarchicalStrategy", (each.name for each in fields(Settings)[1:]))


class HierarchicalArguments:
    """The constructor of the three strategies. It precedes one of Lightning's strategies in the list of bases."""

    _schemes: ClassVar[Mapping[str, Callable[[], Scheme]]] = SCHEMES
    _unsupported: ClassVar[Mapping[str, str]] = {}
    """Why a strategy refuses an argument, and what to do instead."""

    def __init__(
        self,
        scheme: Scheme | SchemeName = "all_reduce",
        ranks_per_node: int | list[int] | None = None,
        wire_dtype: WireDtype | None = None,
        batches: HeterogeneousBatches | None = None,
        average_buffers: bool | list[str] = True,
        average_optimizer_state: bool = False,
        evaluate: Literal["averaged", "replica"] = "averaged",
        checkpoint_replicas: bool = False,
        health: Health = Health(),
        transport: Transport = Transport(),
        elastic: Elastic | str | None = None,
        unequal_data: bool | UnequalData = False,
        **kwargs: Any,
    ) -> None:
        """Check the arguments, and pass all others to Lightning's strategy.

        Args:
            scheme: When and how nodes synchronize: a ``Scheme``, or the name of one with its default arguments.
                Default: gradients are averaged over all nodes at every step, as DDP does; add ``wire_dtype="int8"`` to
                send a quarter of the bytes.
            ranks_per_node: The size of every node, or a list of sizes for unequal nodes, in rank order. Default: as the
                cluster environment reports it on every rank, or by host names if these contradict it, after a warning.
            wire_dtype: Payload type of inter-node traffic: ``"bfloat16"``, ``"float16"``, or ``"int8"`` and ``"int4"``,
                quantized in blocks, whose rounding errors are sent later; or ``"sparse2"``, a sixteenth of the bytes,
                which sends the largest of every 4 elements and the others later. None is the tensors' own. Parameters
                then travel as differences from the last averaged ones.
            batches: Gives ranks of unequal speed batches of unequal size (``HierarchicalStrategy`` only). None: every
                rank uses the dataloader's batch size.
            average_buffers: Average float buffers (BatchNorm statistics) together with the parameters; or the names of
                those that are averaged, in which ``*`` is a wildcard, as in ``["*running_mean", "*running_var"]``. Each
                rank keeps its own of the others, such as queues of samples, which may differ in shape between ranks,
                and of buffers with ``persistent=False``.
            average_optimizer_state: Also average the optimizer's state (momentum, Adam's moments) in the
                synchronizations of ``PeriodicAveraging``. It travels as parameters do, in the form of ``wire_dtype``;
                once in full. Not for sharded modules.
            evaluate: What in-fit validation uses: the averaged parameters (``"averaged"``), or each rank's own
                (``"replica"``), which needs no communication. Only with a Trainer.
            checkpoint_replicas: Also store every rank's own parameters, optimizer and scheme state with each
                checkpoint, for a bit-exact resume. Without it a run resumes from the averaged parameters. Only with a
                Trainer.
            health: How the run reacts to non-finite parameters and to ranks that are frozen; see
                ``lightning_hiercomm.Health``.
            transport: How parameters travel between nodes; see ``lightning_hiercomm.Transport``.
            elastic: Nodes may leave and join (``HierarchicalStrategy`` only); see ``lightning_hiercomm.Elastic``. A
                string is the lighthouse's ``"host:port"``. Every node is then a world of its own. None: all nodes stay.
            unequal_data: Nodes may have unequal numbers of batches (``HierarchicalStrategy`` only): a node without
                batches waits in the synchronizations with weight 0, and the others are weighted by their samples. See
                ``lightning_hiercomm.UnequalData``.
            **kwargs: Arguments of Lightning's strategy.

        Raises:
            ValueError: If an argument has no possible value, or contradicts another one.
            TypeError: If an argument has a wrong type or is unknown.
        """
        self._check_keywords(kwargs)
        if isinstance(transport, str):
            raise TypeError(f"transport={transport!r} must be a Transport: write transport=Transport({transport!r})")
        if isinstance(wire_dtype, torch.dtype):
            wire_dtype = str(wire_dtype).removeprefix("torch.")
        arguments: dict[str, Any] = {
            "scheme": self._scheme_named(scheme),
            "ranks_per_node": ranks_per_node,
            "wire_dtype": wire_dtype,
            "batches": batches,
            "average_buffers": average_buffers,
            "average_optimizer_state": average_optimizer_state,
            "evaluate": evaluate,
            "checkpoint_replicas": checkpoint_replicas,
            "health": health,
            "transport": transport,
            "elastic": Elastic.of(elastic),
            "unequal_data": UnequalData.of(unequal_data),
        }
        for each in fields(Settings):
            if each.name in self._unsupported and arguments[each.name] != each.default:
                raise ValueError(f"{each.name}={arguments[each.name]!r}: {self._unsupported[each.name]}")
        self._settings = Settings(**arguments)
        super().__init__(**kwargs)
        self._configure()

    def _configure(self) -> None:
        """Set the attributes that a strategy needs besides Lightning's."""

    def _check_keywords(self, given: Mapping[str, Any]) -> None:
        """Refuse arguments that are unknown, or that would fail only in the processes that Lightning starts."""
        known = constructor_arguments(type(self))
        if isinstance(self, DDPArguments):
            known += check_ddp_arguments(given, type(self).__name__)
        for name in given:
            if name not in known:
                raise _unknown_keyword(name, type(self).__name__, known)
        methods = Literal["popen", "spawn", "fork", "forkserver"]
        hints = {"timeout": timedelta | None, "start_method": methods, "process_group_backend": str | None}
        check_types({name: given[name] for name in hints if name in given}, hints)

    @classmethod
    def _scheme_named(cls, scheme: Scheme | SchemeName) -> Scheme:
        names = ", ".join(cls._schemes)
        if isinstance(scheme, str):
            if scheme in cls._schemes:
                return cls._schemes[scheme]()
            classes = {made.__name__.lower(): name for name, made in SCHEMES.items()}
            near = difflib.get_close_matches(scheme.lower(), [*classes, *SCHEMES], n=1)
            hint = f". Did you mean {classes.get(near[0], near[0])!r}?" if near else ""
            raise ValueError(f"scheme={scheme!r} is unknown; use one of {names}, or a Scheme{hint}")
        if isinstance(scheme, type) and issubclass(scheme, Scheme):
            raise TypeError(f"scheme={scheme.__name__} is a class: use an instance, {scheme.__name__}(...)")
        if not isinstance(scheme, Scheme):
            raise TypeError(f"scheme={scheme!r} must be a Scheme or one of {names}")
        if type(scheme) is Scheme:
            raise ValueError(f"scheme=Scheme() is the base class, and never synchronizes; use one of {names}")
        return scheme


class DDPArguments:
    """The arguments of strategies that wrap the module in DDP; it precedes Lightning's strategy in the bases."""

    def __init__(self, gradient_as_bucket_view: bool = False, **ddp_kwargs: Any) -> None:
        """Pass arguments to Lightning's ``DDPStrategy``.

        Args:
            gradient_as_bucket_view: Let gradients be views of DDP's buckets instead of copies. True saves one copy of
                the gradients on every rank, and two copies per step, about 5 % of a small model's step. The next
                backward pass then overwrites ``.grad`` tensors that a program keeps, as in gradient surgery.
            **ddp_kwargs: Arguments of Lightning's ``DDPStrategy``, and of ``DistributedDataParallel``, such as
                ``find_unused_parameters``.
        """
        super().__init__(gradient_as_bucket_view=gradient_as_bucket_view, **ddp_kwargs)  # type: ignore[call-arg]

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``hierarchical`` and ``hierarchical_<scheme>``, each also with ranks that are forked."""
        schemes = {"hierarchical": "all_reduce", **{f"hierarchical_{scheme}": scheme for scheme in SCHEMES}}
        for name, scheme in schemes.items():
            for ending, start_method in {"": "popen", "_fork": "fork", "_notebook": "fork"}.items():
                description = f"Nodes synchronize by {scheme}; ranks start by {start_method}"
                arguments = {"scheme": scheme, "start_method": start_method}
                strategy_registry.register(f"{name}{ending}", cls, description, override=True, **arguments)


def constructor_arguments(strategy: type) -> list[str]:
    """List the arguments of a strategy's constructor, and of the next ones to which it passes keywords."""
    names: list[str] = []
    for cls in strategy.__mro__:
        if "__init__" in vars(cls):
            _, *parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
            names += [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
            if not any(each.kind is each.VAR_KEYWORD for each in parameters):
                break
    return names


def check_ddp_arguments(arguments: Mapping[str, Any], strategy: str) -> list[str]:
    """Check keywords that ``DDPStrategy`` passes on, and ``DistributedDataParallel`` refuses only inside ``fit``.

    Returns:
        The names of DDP's arguments that may be set.

    Raises:
        ValueError: If the strategy itself sets an argument.
        TypeError: If a value has a wrong type.
    """
    owned = {"ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period", "process_group"}
    owned |= {"module", "device_ids", "device_mesh", "output_device", "dim"}
    for name in arguments:
        if name in owned:
            raise ValueError(
                f"{name} cannot be set: {strategy} owns DDP's process group, devices and communication hook."
                " Choose what nodes exchange with `scheme` and `wire_dtype`."
            )
    if arguments.get("mixed_precision") is not None:
        raise ValueError(
            f"mixed_precision cannot be set: DDP implements it by a communication hook, which {strategy} owns."
            " Use precision='bf16-mixed' of the Trainer or of Fabric."
        )
    parameters = inspect.signature(DistributedDataParallel).parameters
    flags = {name: bool for name, parameter in parameters.items() if isinstance(parameter.default, bool)}
    check_types({name: arguments[name] for name in flags if name in arguments}, flags)
    check_types(arguments, {"bucket_cap_mb": float | None})
    return sorted(parameters.keys() - owned)


def _unknown_keyword(name: str, strategy: str, known: Sequence[str]) -> TypeError:
    if name.startswith(("compress", "quant")):
        return TypeError(f"{strategy} has no argument {name!r}: wire_dtype='int8' or 'int4' compresses traffic")
    if name not in ARGUMENTS_OF_SCHEMES:
        return unknown_argument(name, strategy, known)
    scheme = ARGUMENTS_OF_SCHEMES[name]
    return TypeError(
        f"{strategy} has no argument {name!r}, which is the scheme's: write {strategy}({scheme}({name}=...))"
    )

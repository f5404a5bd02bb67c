"""The arguments of the three strategies, checked before any process starts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_hiercomm._lightning.collectives import collectives_of_default_group
from lightning_hiercomm.arguments import check_types, checked_fields, note_owner, unknown_argument
from lightning_hiercomm.batches import HeterogeneousBatches
from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.mpi import load_mpi
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.elastic.configuration import Elastic
from lightning_hiercomm.nodes.connect import check_backend
from lightning_hiercomm.nodes.topology import Topology, nodes_by_count
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import SCHEMES, Scheme
from lightning_hiercomm.schemes.gradient_path import GradientPath
from lightning_hiercomm.schemes.samples import SampleWeights
from lightning_hiercomm.trainer.options import Health, Transport

F = TypeVar("F", bound=Callable[..., None])

Contradictions = tuple[tuple[Callable[["Settings"], object], str], ...]

_CONTRADICTIONS: Contradictions = (
    (
        lambda given: type(given.scheme) is Scheme,
        "scheme=Scheme() is the base class, and never synchronizes; use one of its subclasses",
    ),
    (
        lambda given: given.average_optimizer_state and not given.scheme.requirements.can_average_optimizer_state,
        "average_optimizer_state=True does nothing with {given.scheme.__class__.__name__}, which never synchronizes all"
        " parameters at once: leave it out, or use PeriodicAveraging",
    ),
    (
        lambda given: given.unequal_data and given.scheme.requirements.needs_equal_data,
        "unequal_data: {given.scheme.requirements.needs_equal_data}",
    ),
    (
        lambda given: given.unequal_data and given.batches,
        "unequal_data: HeterogeneousBatches divides one dataset among all ranks: leave batches or unequal_data out",
    ),
    (
        lambda given: given.unequal_data and given.elastic,
        "unequal_data: elastic nodes divide one dataset among the nodes that are there: leave elastic or unequal_data"
        " out",
    ),
    (
        lambda given: given.unequal_data == "",
        "unequal_data='' must be True, False or the name of a number that training_step logs",
    ),
    (
        lambda given: given.elastic and given.scheme.requirements.needs_fixed_nodes,
        "elastic nodes: {given.scheme.requirements.needs_fixed_nodes}",
    ),
    (
        lambda given: given.elastic and given.batches,
        "elastic nodes: HeterogeneousBatches divides a batch among ranks that stay: leave batches out",
    ),
    (
        lambda given: given.elastic and given.ranks_per_node is not None,
        "elastic nodes: every node is a world of its own: leave ranks_per_node out",
    ),
    (
        lambda given: given.elastic and given.transport.inter_node == "mpi",
        "elastic nodes: MPI ends the run with the first rank that dies: use inter_node='torch'",
    ),
    (
        lambda given: given.elastic and given.average_optimizer_state,
        "elastic nodes: the optimizer's state is not rolled back: leave average_optimizer_state out",
    ),
    (
        lambda given: given.elastic and given.checkpoint_replicas,
        "elastic nodes: no later run has the same replicas: leave checkpoint_replicas out",
    ),
)
"""Arguments that contradict each other or the scheme, each with the error."""

SHARDED: Contradictions = (
    (
        lambda given: given.scheme.requirements.needs_whole_parameters,
        "{given.scheme.requirements.needs_whole_parameters}",
    ),
)
"""Further ones where parameters are sharded inside a node."""

WITHOUT_TRAINER: Contradictions = (
    (
        lambda given: getattr(given.scheme, "first_phase", 0),
        "warmup_steps={given.scheme.first_phase} needs a Trainer, whose strategy changes the ranks over which DDP"
        " averages gradients: leave it out, or train the first steps with AllReduce",
    ),
)
"""Further ones in a loop of the user's own."""

WireDtype = Literal["float32", "bfloat16", "raw_bfloat16", "float16", "int8", "int4", "sparse2"]


@checked_fields
@dataclass(frozen=True)
class Settings:
    """The arguments of a strategy; the constructor of ``HierarchicalStrategy`` documents them.

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
    checkpoint_replicas: bool = False
    health: Health = Health()
    transport: Transport = Transport()
    elastic: Elastic | None = None
    unequal_data: bool | str = False

    def __post_init__(self) -> None:
        sizes = self.ranks_per_node
        if self.transport.inter_node == "mpi":
            load_mpi()  # Lightning's own attempt fails without naming what is missing
        if sizes is not None and min([sizes] if isinstance(sizes, int) else sizes, default=0) < 1:
            raise ValueError(f"ranks_per_node={sizes} must be a positive number, or a list of one per node")
        self._refuse(_CONTRADICTIONS)

    def _refuse(self, contradictions: Contradictions) -> None:
        for contradicts, message in contradictions:
            if contradicts(self):
                raise ValueError(message.format(given=self))

    @classmethod
    def of(
        cls,
        schemes: Mapping[str, Callable[[], Scheme]],
        arguments: Mapping[str, Any],
        further: Contradictions = (),
    ) -> Settings:
        """Check a strategy's arguments as users write them, with names of schemes and short forms.

        Args:
            schemes: By the name that a user may give.
            arguments: The ``locals()`` of the strategy's constructor; those of other names are ignored.
            further: Contradictions in this strategy only.
        """
        given = {each.name: arguments[each.name] for each in fields(cls) if each.name in arguments}
        scheme = given["scheme"]
        if isinstance(scheme, str):
            if scheme not in schemes:
                raise ValueError(f"scheme={scheme!r} is unknown; use one of {', '.join(schemes)}, or a Scheme")
            given["scheme"] = schemes[scheme]()
        if "elastic" in given:
            given["elastic"] = Elastic.of(given["elastic"])
        settings = cls(**given)
        settings._refuse(further)
        return settings

    @property
    def wire(self) -> Wire:
        """The form of inter-node traffic."""
        return Wire("bfloat16", raw=True) if self.wire_dtype == "raw_bfloat16" else Wire(self.wire_dtype)

    @property
    def bucket_bytes(self) -> int:
        """Size of the buckets in which parameters travel."""
        return max(1, int(self.transport.bucket_mb * 2**20))

    def as_written(self) -> str:
        """Return the arguments as a user writes them."""
        _, *others = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        written = [f"{name}={value!r}" for name, value, default in others if value != default]
        return ", ".join([repr(self.scheme), *written])

    def check_launch(self, devices: Sequence[torch.device] | None, backend: str | None, world_size: int) -> None:
        """Check devices, backend and ranks before processes start."""
        for device in devices or ():
            streams.check_known(device)
        check_backend(backend, devices or ())
        if self.ranks_per_node is not None:
            nodes_by_count(self.ranks_per_node, world_size)

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
            # each elastic node has a default process group of its own
            collectives=(lambda: 0) if self.elastic is not None else collectives_of_default_group,
            samples=SampleWeights() if self.unequal_data else None,
        )


for _scheme in SCHEMES.values():
    note_owner(_scheme.__name__, inspect.signature(_scheme).parameters)
for _argument, _group in (
    ("batches", HeterogeneousBatches),
    ("health", Health),
    ("transport", Transport),
    ("elastic", Elastic),
):
    note_owner(f"{_argument}={_group.__name__}", inspect.signature(_group).parameters)
note_owner("HierarchicalStrategy", (each.name for each in fields(Settings)[1:]))


def check_keywords(strategy: type, given: Mapping[str, Any], known: Sequence[str] = ()) -> None:
    """Refuse arguments that are unknown, or that would fail only in the processes that Lightning starts.

    Args:
        strategy: The class that is made.
        given: The keywords that its signature does not name.
        known: Names of keywords that Lightning passes on.
    """
    names = [*constructor_arguments(strategy), *known]
    for name in given:
        if name not in names:
            raise unknown_argument(name, strategy.__name__, names)
    methods = Literal["popen", "spawn", "fork", "forkserver"]
    hints = {"timeout": timedelta | None, "start_method": methods, "process_group_backend": str | None}
    check_types({name: given[name] for name in hints if name in given}, hints)


def register_schemes(strategy: type, strategy_registry: Any) -> None:
    """Register ``hierarchical`` and ``hierarchical_<scheme>``, each also with ranks that are forked."""
    schemes = {"hierarchical": "all_reduce", **{f"hierarchical_{scheme}": scheme for scheme in SCHEMES}}
    for name, scheme in schemes.items():
        for ending, start_method in {"": "popen", "_fork": "fork", "_notebook": "fork"}.items():
            description = f"Nodes synchronize by {scheme}; ranks start by {start_method}"
            arguments = {"scheme": scheme, "start_method": start_method}
            strategy_registry.register(f"{name}{ending}", strategy, description, override=True, **arguments)


def described_like(other: Callable[..., None]) -> Callable[[F], F]:
    """Decorate a constructor: it takes over another one's descriptions of arguments that both have."""

    def decorate(constructor: F) -> F:
        entries = re.split(r"\n(?=    (?! ))", inspect.cleandoc(other.__doc__ or "").partition("\nArgs:")[2])
        shared = [
            each for each in entries if each.partition(":")[0].strip() in inspect.signature(constructor).parameters
        ]
        head, _, own = inspect.cleandoc(constructor.__doc__ or "").partition("\nArgs:\n")
        constructor.__doc__ = "\n".join([head, "Args:", *shared, own])
        return constructor

    return decorate


def constructor_arguments(strategy: type) -> list[str]:
    """List the arguments of a strategy's constructor, and of the next ones to which it passes keywords."""
    names: list[str] = []
    for cls in strategy.__mro__:
        if "__init__" in vars(cls):
            _, *parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
            names += [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
            if not any(each.kind is each.VAR_KEYWORD for each in parameters):
                break
    return list(dict.fromkeys(names))


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

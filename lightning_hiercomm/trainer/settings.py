"""What a user may choose about how nodes agree, checked before anything starts."""

from __future__ import annotations

import difflib
import inspect
import math
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from lightning_hiercomm._lightning.collectives import CollectiveCounter
from lightning_hiercomm.arguments import check_types, checked_arguments
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
from lightning_hiercomm.schemes.health.nonfinite import OnNonfinite
from lightning_hiercomm.schemes.health.verification import VerifyReplicas
from lightning_hiercomm.trainer.elastic_refusals import check_arguments

ARGUMENTS_OF_SCHEMES = {
    name: scheme.__name__ for scheme in reversed(SCHEMES.values()) for name in inspect.signature(scheme).parameters
}
"""Names of what schemes take, with the first scheme that does."""


_WIRES = ("float32", "bfloat16", "float16", "int8", "int4", "top4")


@dataclass(frozen=True)
class Settings:
    """The arguments that every strategy whose nodes agree has in common.

    They are documented where users meet them: :class:`~lightning_hiercomm.trainer.strategy.HierarchicalStrategy`.
    """

    scheme: Scheme
    batches: HeterogeneousBatches | None
    ranks_per_node: int | list[int] | None
    inter_node: Literal["torch", "gloo", "mpi"]
    wire: Wire
    average_buffers: bool | list[str]
    average_optimizer_state: bool
    evaluate: Literal["consensus", "replica"]
    checkpoint_replicas: bool
    on_nonfinite: OnNonfinite
    verify_replicas: VerifyReplicas
    control_port: int
    hang_timeout: float | None
    bucket_bytes: int
    elastic: Elastic | None = None

    @classmethod
    @checked_arguments
    def checked(
        cls,
        *,
        scheme: Scheme | SchemeName,
        batches: HeterogeneousBatches | None = None,
        ranks_per_node: int | list[int] | None,
        inter_node: Literal["torch", "gloo", "mpi"],
        wire_dtype: Literal["float32", "bfloat16", "float16", "int8", "int4", "top4"] | None,
        wire_raw: bool,
        average_buffers: bool | list[str],
        average_optimizer_state: bool = False,
        evaluate: Literal["consensus", "replica"] = "consensus",
        checkpoint_replicas: bool = False,
        on_nonfinite: OnNonfinite,
        verify_replicas: VerifyReplicas,
        control_port: int | None = None,
        hang_timeout: float | None = None,
        bucket_mb: float,
        elastic: Elastic | str | None = None,
    ) -> Settings:
        """Make settings of a strategy's arguments; what has a default here is what not all of them offer.

        Raises:
            ValueError: For arguments that make no sense, naming what would be right.
            TypeError: For arguments of a wrong type, likewise.
        """
        if isinstance(scheme, str):
            if scheme not in SCHEMES:
                near = _near_name(scheme)
                hint = "" if near is None else f". Did you mean {near!r}?"
                raise ValueError(f"scheme={scheme!r} is unknown; use one of {', '.join(SCHEMES)}, or a Scheme{hint}")
            scheme = SCHEMES[scheme]()
        if not isinstance(scheme, Scheme):
            raise ValueError(f"scheme={scheme!r} must be a Scheme or one of {', '.join(SCHEMES)}")
        if type(scheme) is Scheme:
            raise ValueError(f"scheme=Scheme() is the base of all, and never agrees; use one of {', '.join(SCHEMES)}")
        _warn_of_kept_arguments(scheme)
        if evaluate not in ("consensus", "replica"):
            raise ValueError(f"evaluate={evaluate!r} must be 'consensus' or 'replica'")
        if inter_node not in ("torch", "gloo", "mpi"):
            raise ValueError(f"inter_node={inter_node!r} must be 'torch', 'gloo' or 'mpi'")
        if inter_node == "mpi":
            load_mpi()  # or Lightning finds mpi4py without a library, and fails with less to say
        sizes = [ranks_per_node] if isinstance(ranks_per_node, int) else ranks_per_node
        if sizes is not None and (not sizes or min(sizes) < 1):
            raise ValueError(f"ranks_per_node={ranks_per_node} must be a positive number, or a list of one per node")
        if not 0 < bucket_mb < 2**40:
            raise ValueError(f"bucket_mb={bucket_mb} must be positive, and a size that memory can have")
        if on_nonfinite not in ("raise", "skip", "ignore"):
            raise ValueError(f"on_nonfinite={on_nonfinite!r} must be 'raise', 'skip' or 'ignore'")
        if on_nonfinite == "skip" and "world" in (scheme.gradients, scheme.first_gradients):
            who = type(scheme).__name__ if scheme.first_gradients is None else f"{scheme!r} first"
            raise ValueError(
                f"on_nonfinite='skip' leaves a node out of an agreement, but {who} averages every gradient over all"
                " nodes: use 'raise' or 'ignore'; precision='16-mixed' skips steps that overflow"
            )
        if verify_replicas not in ("off", "warn", "raise"):
            raise ValueError(f"verify_replicas={verify_replicas!r} must be 'off', 'warn' or 'raise'")
        if verify_replicas != "off" and scheme.gradients == "none":
            raise ValueError(
                f"verify_replicas={verify_replicas!r} compares the ranks of a node, but with {scheme!r} every rank"
                " trains alone: leave it out, or let ranks share their gradients"
            )
        if control_port is not None and not 0 <= control_port < 65536:
            raise ValueError(f"control_port={control_port} must be a port number, from 1 to 65535, or None for any")
        if hang_timeout is not None and not 1 <= hang_timeout < math.inf:
            raise ValueError(f"hang_timeout={hang_timeout} must be a number of seconds from 1 on, or None for never")
        if wire_raw and wire_dtype is None:
            raise ValueError("wire_raw=True needs a wire_dtype to cast to, such as 'bfloat16'")
        if wire_raw and codec_named(wire_dtype).needs_feedback:
            raise ValueError(
                f"wire_raw=True sends parameters themselves, of which wire_dtype={wire_dtype!r} would drop most: leave"
                " wire_raw out, or use 'bfloat16'"
            )
        if average_optimizer_state and not scheme.profile.can_average_optimizer_state:
            raise ValueError(
                f"average_optimizer_state=True does nothing with {type(scheme).__name__}, whose nodes never wait to"
                " agree on all that they hold: leave it out, or use PeriodicAveraging"
            )
        elastic = Elastic.of(elastic)
        if elastic is not None:
            check_arguments(
                scheme,
                batches=batches,
                ranks_per_node=ranks_per_node,
                inter_node=inter_node,
                average_optimizer_state=average_optimizer_state,
                checkpoint_replicas=checkpoint_replicas,
                on_nonfinite=on_nonfinite,
                evaluate=evaluate,
            )
        return cls(
            elastic=elastic,
            scheme=scheme,
            batches=batches,
            ranks_per_node=ranks_per_node,
            inter_node=inter_node,
            wire=Wire.named(wire_dtype, wire_raw),
            average_buffers=average_buffers,
            average_optimizer_state=average_optimizer_state,
            evaluate=evaluate,
            checkpoint_replicas=checkpoint_replicas,
            on_nonfinite=on_nonfinite,
            verify_replicas=verify_replicas,
            control_port=control_port or 0,
            hang_timeout=hang_timeout,
            bucket_bytes=max(1, int(bucket_mb * 2**20)),
        )

    def said_of(self, strategy: type, sizes: Sequence[int] | None) -> list[str]:
        """These arguments as one would write them: the scheme, the nodes, and what is not the default.

        Args:
            strategy: Whose arguments they are.
            sizes: Of the nodes, if they are known.
        """
        said = [repr(self.scheme)]
        if sizes is not None and len(sizes) > 8 and len(set(sizes)) == 1:
            said.append(f"ranks_per_node=[{sizes[0]}] * {len(sizes)}")
        elif sizes is not None or self.ranks_per_node is not None:
            said.append(f"ranks_per_node={list(sizes) if sizes is not None else self.ranks_per_node}")
        said += [f"wire_dtype={name!r}" for name in _WIRES if codec_named(name) == self.wire.codec]
        said += ["wire_raw=True"] if self.wire.raw else []
        for name, parameter in inspect.signature(strategy).parameters.items():
            if name not in ("scheme", "ranks_per_node", "control_port"):
                value = getattr(self, name, parameter.default)
                if value is not parameter.default and value != parameter.default:
                    said.append(f"{name}={value!r}")
        return said

    def new_run(self, replicas: Replicas, topology: Topology, gradients: GradientPath | None = None) -> TrainingRun:
        """The module's schemes, built; see :class:`~lightning_hiercomm.run.training_run.TrainingRun`. Collective."""
        return TrainingRun(
            self.scheme,
            replicas,
            topology,
            self.wire,
            self.average_optimizer_state,
            gradients,
            on_nonfinite=self.on_nonfinite,
            verify_replicas=self.verify_replicas,
            collectives=self._collectives(topology),
        )

    def node_process_group(self, topology: Topology) -> dist.ProcessGroup | None:
        """The process group of this node's ranks.

        Raises:
            RuntimeError: If they hold different parameters.
        """
        if self.scheme.gradients == "none":
            raise RuntimeError(
                f"node_process_group: with {self.scheme!r} every rank trains a model of its own, so the ranks of a node"
                " must not share its parameters or gradients: use gradients='node'"
            )
        return process_group(topology.intra)

    def _collectives(self, topology: Topology) -> CollectiveCounter | None:
        """What counts collectives between ranks with different parameters; None if there are no such ranks."""
        if self.scheme.gradients == "world" or not dist.is_initialized():
            return None
        if topology.may_grow:  # each node has a default process group of its own
            return None
        sharing = topology.nodes[topology.node] if self.scheme.gradients == "node" else (topology.rank,)
        return None if len(sharing) == topology.world_size else CollectiveCounter(sharing)


def _near_name(name: str) -> str | None:
    """The name of a scheme that somebody may have meant who wrote another, or the class's."""
    known = {**{scheme.__name__.lower(): key for key, scheme in SCHEMES.items()}, **{key: key for key in SCHEMES}}
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return known[near[0]] if near else None


def _warn_of_kept_arguments(scheme: Scheme) -> None:
    """Warn where a scheme whose class was given on the command line has values of the class before it.

    By design (its issue 460), jsonargparse keeps from the configuration files what the new class takes as well, and the
    objects that it makes do not know where their arguments come from: so this reads the command line.
    """
    command_line = " ".join(sys.argv)
    if not re.search(r"\.scheme(\.class_path)?[ =]\S*\b" + type(scheme).__name__ + r"\b", command_line):
        return
    before = set[str]().union(
        *(inspect.signature(other).parameters for other in SCHEMES.values() if other is not type(scheme))
    )
    given = re.findall(r"\.scheme(?:\.init_args)?\.(\w+)", command_line)
    kept = [
        f"{name}={getattr(scheme, name)!r}"
        for name, parameter in inspect.signature(type(scheme)).parameters.items()
        if name in before and name not in given and getattr(scheme, name, parameter.default) != parameter.default
    ]
    if kept:
        warnings.warn(
            f"{type(scheme).__name__}, chosen on the command line, keeps {', '.join(kept)} from the configuration file,"
            " even if that was meant for another scheme. Give these arguments, too, or choose the scheme by its name,"
            " which stands for its own defaults.",
            stacklevel=4,
        )


def check_start(timeout: timedelta | None, start_method: str, process_group_backend: str | None) -> None:
    """Refuse what Lightning takes, and processes that have been started stumble over.

    Raises:
        TypeError: If a type is wrong, naming the argument.
        ValueError: If there is no such way to start processes, likewise.
    """
    given = {"timeout": timeout, "start_method": start_method, "process_group_backend": process_group_backend}
    check_types(given, {"timeout": timedelta | None, "start_method": str, "process_group_backend": str | None})
    methods = ("popen", "spawn", "fork", "forkserver")
    if start_method not in methods:
        raise ValueError(f"start_method={start_method!r} must be one of {', '.join(map(repr, methods))}")


def register_schemes(strategy: Callable[..., Any], registry: Any) -> None:
    """Register ``hierarchical`` and ``hierarchical_<scheme>``, each also with ranks that are forked."""
    schemes = {"hierarchical": "all_reduce", **{f"hierarchical_{scheme}": scheme for scheme in SCHEMES}}
    for name, scheme in schemes.items():
        for ending, start_method in {"": "popen", "_fork": "fork", "_notebook": "fork"}.items():
            description = f"Nodes agree by {scheme}; ranks start by {start_method}"
            arguments = {"scheme": scheme, "start_method": start_method}
            registry.register(f"{name}{ending}", strategy, description, override=True, **arguments)

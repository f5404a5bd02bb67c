"""SSD-SGD: nodes push every gradient, pull the weights only every few steps, and update locally in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes.base import RunningScheme, Scheme
from lightning_hiercomm.schemes.context import Context
from lightning_hiercomm.schemes.in_place_of_step import Update
from lightning_hiercomm.schemes.optimizer_state import values_of
from lightning_hiercomm.schemes.reducers.disagreement import Disagreement, sample
from lightning_hiercomm.schemes.requirements import Requirements
from lightning_hiercomm.schemes.scheme_state import LOCAL, TRANSIENT, SchemeState
from lightning_hiercomm.schemes.steps_delay.rules import LOCAL_RULES, LocalUpdate
from lightning_hiercomm.schemes.steps_delay.served_optimizers import check_served
from lightning_hiercomm.schemes.steps_delay.server import ServedBucket, ShardedServer


class StepsDelay(Scheme):
    """Send every gradient, but fetch the global weights only every ``delay`` steps; training waits for neither.

    A parameter server, sharded over the ranks, has the global weights w and the optimizer's state. It takes one step
    per iteration with the mean of the nodes' gradients. In iteration n, node m with weights w'_m does the following (k
    = ``delay``, u counts from the end of warm-up)::

        g_m := mean over the node of the gradients at w'_m
        push g_m;  the server steps: w := optimizer(w, sum_m W_m g_m)
        if u % k == 0 and u > 0:  w'_m := the w that was pulled one iteration ago
        w'_m := local rule(w'_m, g_m)                                                                   (Eq. 8)
        if u % k == k - 1:        pull w, including this iteration's gradients

    Push, server step and pull are asynchronous. The forward pass after the next one uses a pull. The first
    ``warmup_steps`` iterations are synchronous SGD. On one node this is plain data-parallel training.

    A node sends ``(M - 1) / M * (1 + 1 / k)`` of the model per step; an all-reduce sends ``2 (M - 1) / M``. A rank
    holds its shard of the optimizer's state, the weights pulled last, and its messages.

    **Learning rates.** The server has optimizers of the user's class, which step with the values that a scheduler, a
    callback or a hook has set in the user's param groups. Their update must be elementwise and leave values of the
    param groups alone, which a trial on other tensors checks. The local rule uses ``local_lr_scale`` times the learning
    rate. With momentum m the server moves by ``lr / (1 - m)`` per unit of gradient, and GLU by
    ``(alpha + beta) * local_lr_scale * lr``; by default they are equal. torch keeps the learning rate out of the
    momentum buffer (unlike MXNet, which the paper uses), so after a change of the learning rate old gradients count
    with the new one.

    **Clipping and fp16** act on the node's mean gradient before it is sent. A node whose gradient scaler skips a step
    sends zeros and keeps its weights. A parameter without gradient has gradient zero.

    **Writes to weights** outside of the optimizer's step (clamping, masks, a new head) reach the server in the warm-up,
    if every rank writes the same after the step. After the warm-up the next pull overwrites them.

    **The averaged model** is the server's weights, gathered for validation, checkpoints and at the end. Checkpoints
    hold the optimizer's state of whole parameters, so they resume under plain DDP or on any number of ranks. The
    optimizer's own ``state`` is empty during the run. Hooks on its ``step`` run once per iteration, before the push.

    Source: Xu et al., "SSD-SGD: Communication Sparsification for Distributed Deep Learning Training", 2021,
    Algorithms 1 and 2.

    Args:
        delay: Steps between pulls, k.
        warmup_steps: Synchronous iterations at the start; a multiple of ``delay``. The paper's wp + 1.
        alpha: Weight of the local gradient in GLU.
        beta: Weight of the global gradient in GLU.
        local_lr_scale: The local learning rate divided by the server's. Default: for GLU
            ``(1 - dampening) / ((1 - momentum) (alpha + beta))`` of each param group (the paper's 4 at momentum 0.9),
            for ``"sgd"`` 0.25 and for ``"dc_asgd"`` 1, as in the paper.
        local_update: The local rule: ``"glu"`` (the optimizer must be SGD), ``"sgd"`` or ``"dc_asgd"``.

    Raises:
        ValueError: For arguments out of range; and, when it is built, for optimizers that the scheme cannot serve.
    """

    def __init__(
        self,
        delay: int = 4,
        warmup_steps: int = 500,
        alpha: float = 2.0,
        beta: float = 0.5,
        local_lr_scale: float | None = None,
        local_update: Literal["glu", "sgd", "dc_asgd"] = "glu",
    ) -> None:
        if delay < 1:
            raise ValueError(f"delay={delay} must be a positive number of steps")
        if warmup_steps < 0 or warmup_steps % delay:
            below = max(0, warmup_steps) // delay * delay
            raise ValueError(
                f"warmup_steps={warmup_steps} must be a multiple of delay={delay}, such as {below} or {below + delay}"
            )
        if local_lr_scale is not None and local_lr_scale <= 0:
            raise ValueError(f"local_lr_scale={local_lr_scale} must be positive, or None for what fits the rule")
        if local_lr_scale is None and local_update == "glu" and alpha + beta <= 0:
            raise ValueError(f"alpha={alpha} and beta={beta} must not add up to zero or less, or name a local_lr_scale")
        self.delay = delay
        self.warmup_steps = warmup_steps
        self.alpha = alpha
        self.beta = beta
        self.local_lr_scale = local_lr_scale
        self.local_update = local_update

    def build(self, context: Context) -> RunningStepsDelay | RunningOnOneNode:
        check_served(context, self.local_update)
        return RunningOnOneNode(self, context) if context.topology.num_nodes == 1 else RunningStepsDelay(self, context)

    @property
    def requirements(self) -> Requirements:
        return replace(
            super().requirements,
            needs_whole_parameters=f"{type(self).__name__} keeps the model on servers of its own: use"
            " HierarchicalStrategy, or another scheme",
            needs_own_parameters=f"{type(self).__name__} has a server for each optimizer, whose next pull undoes the"
            " steps of the other one: give the parameter to one optimizer, or use another scheme",
        )

    def check_run(self, nodes: int, steps_of_epoch: float, steps: float) -> Iterator[str]:
        if 0 < steps <= self.warmup_steps:
            yield (
                f"StepsDelay(warmup_steps={self.warmup_steps}) trains synchronously that long, but the run ends after"
                f" {steps:.0f} optimizer steps: none is delayed. Choose a smaller multiple of delay={self.delay}."
            )

    def local_scale(self, group: Mapping[str, Any]) -> float:
        """The local learning rate of a param group, divided by the server's."""
        if self.local_lr_scale is not None:
            return self.local_lr_scale
        if self.local_update == "glu":
            kept = 1.0 - float(group.get("momentum", 0.0))
            return (1.0 - _dampening_of(group)) / (kept * (self.alpha + self.beta))
        return 0.25 if self.local_update == "sgd" else 1.0


@dataclass
class StepsDelayState(SchemeState):
    """The state of StepsDelay.

    Attributes:
        delayed_steps: Steps since the end of warm-up, u.
        has_pulled: Whether the next iteration uses weights that were pulled.
        server: The server, and what this rank pulled from it.
        holds_final_weights: Whether the replica holds the server's weights, from the end of a run until the next step.
    """

    delayed_steps: int = field(default=0, metadata=LOCAL)
    has_pulled: bool = field(default=False, metadata=LOCAL)
    server: ShardedServer = field(init=False, metadata=LOCAL)
    holds_final_weights: bool = field(default=False, metadata=TRANSIENT)

    def settle(self) -> None:
        self.server.settle()


class RunningOnOneNode(RunningScheme[StepsDelay]):
    """The scheme on one node: plain data-parallel training."""

    def after_step(self, last: bool) -> None:
        self.state.unsynchronized_steps = 0  # there is no other replica


class RunningStepsDelay(RunningScheme[StepsDelay]):
    """The scheme on several nodes: every rank owns a shard of the server, and has the weights pulled from it."""

    state: StepsDelayState
    state_type = StepsDelayState

    def __init__(self, config: StepsDelay, context: Context) -> None:
        super().__init__(config, context)
        self._context = context
        self._disagreement = Disagreement()
        self._pull_group = self.topology.duplicate().inter
        self._background = self._new_background()
        self._serve({})

    # ---- one iteration of Algorithm 1, from the gradients on -----------------------------------------------------

    def before_step(self, last: bool) -> Update:
        return self._run_iteration

    def _run_iteration(self, optimizer_step: Callable[[], object] | None) -> None:
        """Run an iteration instead of the optimizer's step; ``optimizer_step`` is None if the gradients overflowed."""
        self.state.holds_final_weights = False
        if optimizer_step is None:
            values = self._group_values()
        else:
            values = self._step_without_gradients(optimizer_step)
            self.guard.check_gradients()
        run = self._step_synchronously if self.phase == "warm-up" else self._step_delayed
        with torch.no_grad():
            self._take_writes()
            run(optimizer_step is not None, values)

    def _step_synchronously(self, has_gradients: bool, values: list[dict[str, Any]]) -> None:
        """Step in the warm-up: push, and wait for the weights after it."""
        server = self.state.server
        for bucket in server.buckets:
            server.push(bucket, values[bucket.group], has_gradients, pull=True)
        for bucket, _ in server.pulled():
            bucket.bucket.unpack(bucket.pulled)
        self.state.has_pulled = False
        self.state.synchronizations += 1

    def _step_delayed(self, has_gradients: bool, values: list[dict[str, Any]]) -> None:
        """Step after the warm-up: push, take the weights that were pulled before, update locally, and pull."""
        state, server, delay = self.state, self.state.server, self.config.delay
        has_arrived, pulls = state.has_pulled, state.delayed_steps % delay == delay - 1
        if state.delayed_steps == 0:
            for bucket in server.buckets:
                bucket.bucket.pack(bucket.pulled)  # pre := w' at first use
        arrivals = server.pulled() if has_arrived else ((bucket, bucket.pulled) for bucket in server.buckets)
        for index, (bucket, before) in enumerate(arrivals):
            server.push(bucket, values[bucket.group], has_gradients, pulls)
            if has_gradients:
                self._update_locally(index, bucket, before)
            elif has_arrived:
                bucket.bucket.unpack(bucket.pulled)
        state.has_pulled = pulls
        state.delayed_steps += 1
        if has_arrived:
            state.unsynchronized_steps = 0
            state.synchronizations += 1

    def _update_locally(self, index: int, bucket: ServedBucket, before: Tensor) -> None:
        """Apply the local rule to a bucket's weights, or to the pulled ones if a pull has arrived after ``before``."""
        config, group, spares = self.config, self.optimizer.param_groups[bucket.group], self.state.server.spares
        has_arrived = before is not bucket.pulled
        learning_rate = float(group["lr"])
        samples: list[Tensor] = []
        offset = 0
        for part in bucket.parts:  # they fit into the cache
            here = slice(offset, offset + part.numel)
            with spares.lend(part.numel, part.dtype, part.device) as new:
                in_place, gradient = part.view(), part.view(gradients=True)
                held = part.pack(new()) if in_place is None else in_place
                weights = new().copy_(bucket.pulled[here]) if has_arrived else held
                if has_arrived:
                    samples.append(sample(held, offset, bucket.bucket.numel))
                if gradient is None:
                    gradient = part.pack_gradients(new())
                update = LocalUpdate(
                    weights=weights,
                    gradient=-gradient if group.get("maximize") else gradient,
                    taken_at=held,
                    pulled=before[here],
                    mean_square=bucket.mean_square[here],
                    learning_rate=learning_rate,
                    local_learning_rate=config.local_scale(group) * learning_rate,
                    momentum=float(group.get("momentum", 0.0)),
                    dampening=_dampening_of(group),
                    weight_decay=float(group.get("weight_decay", 0.0)),
                    delay=config.delay,
                    alpha=config.alpha,
                    beta=config.beta,
                )
                LOCAL_RULES[config.local_update](update)
                if weights is not in_place:
                    part.unpack(weights)
            offset += part.numel
        if has_arrived:
            self._disagreement.compare(index, torch.cat(samples), sample(bucket.pulled[:offset]), offset)

    def _take_writes(self) -> None:
        """Let the server take what a program wrote to the weights in the warm-up; later these are not the server's."""
        if not self.state.delayed_steps:
            for bucket in self.state.server.buckets:
                bucket.take_writes()

    # ---- the user's optimizer ------------------------------------------------------------------------------------

    def _step_without_gradients(self, optimizer_step: Callable[[], object]) -> list[dict[str, Any]]:
        """Call the user's step, which moves nothing, for hooks, and for schedulers, which check that it is called.

        Returns:
            The values with which the server steps: those of the param groups between hooks before and after the step.
        """
        if hasattr(self.optimizer, "found_inf"):
            raise ValueError(
                "with fused=True the gradients are unscaled inside the optimizer's kernel, so the server would get"
                " scaled ones: use fused=False together with a gradient scaler"
            )
        seen: list[list[dict[str, Any]]] = []
        gradients = [parameter.grad for parameter in self.replica.parameters]
        for parameter in self.replica.parameters:
            parameter.grad = None
        with ExitStack() as hooks:
            with suppress(AttributeError):  # an optimizer that has not called the constructor of torch's has no hooks
                hook = self.optimizer.register_step_pre_hook(lambda *_: seen.append(self._group_values()))
                hooks.enter_context(hook)
            optimizer_step()
        for parameter, gradient in zip(self.replica.parameters, gradients, strict=True):
            parameter.grad = gradient
            if gradient is not None and gradient.is_sparse:
                parameter.grad = gradient.to_dense()  # rows do not divide into the server's shards
        return seen[0] if seen else self._group_values()  # later ones are steps of base classes

    def _group_values(self) -> list[dict[str, Any]]:
        return list(map(values_of, self.optimizer.param_groups))

    # ---- a run ---------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:  # type: ignore[override]
        return "warm-up" if self.state.steps < self.config.warmup_steps else "delay"

    def follow(self, replica: Replica) -> None:
        state = self.state.server.optimizer_state()
        super().follow(replica)
        self._serve(state)

    def _serve(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Make a server of the replica's parameters, with the state of the last one's optimizers."""
        context = replace(self._context, replica=self.replica)
        server = self.state.server = ShardedServer(context, self._pull_group, self._background)
        server.take_optimizer_state(state)
        if self.config.local_update == "dc_asgd":
            for bucket in server.buckets:
                bucket.mean_square = torch.zeros_like(bucket.pulled)
        self.state.delayed_steps, self.state.has_pulled = 0, False

    def begin_run(self, epochs: int | None, steps: int | None) -> None:
        # what a checkpoint put into the user's optimizer belongs to the server
        if self.optimizer.state:
            self.state.server.take_optimizer_state(self.optimizer.state)
            self.optimizer.state.clear()

    def after_step(self, last: bool) -> None:
        was_warming_up = self.state.steps <= self.config.warmup_steps
        if was_warming_up and not self.replica.buffers and not self.wire.is_lossy:
            self.state.unsynchronized_steps = 0

    @torch.no_grad()
    def synchronize(self) -> None:
        """Write the server's weights to the replica, and the mean of the float buffers over all ranks."""
        self.state.settle()
        if self.state.holds_final_weights:
            return
        self._take_writes()
        for bucket in self.state.server.buckets:
            bucket.bucket.unpack(self.state.server.gather(bucket, bucket.values))
        self.guard.average(self.replica.buckets_of_buffers)

    def finish(self) -> None:
        # a checkpoint that is saved after the run finds it where that of any other optimizer is
        state = self.state.server.optimizer_state(only_on=0)
        super().finish()
        self.optimizer.state.update(state)
        self.state.holds_final_weights = True

    # ---- state and scalars ---------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """``phase`` (0 warm-up, 1 delay), ``sync_every``, ``staleness`` and ``disagreement``; none on one node.

        The staleness is the number of the server's steps that the node's weights lack. The disagreement is their
        relative distance from the server's weights at the last pull, estimated on a few elements.
        """
        delayed_steps, relative = self.state.delayed_steps, self._disagreement.relative()
        return {
            "phase": float(self.phase == "delay"),
            "sync_every": 1.0 if self.phase == "warm-up" else float(self.config.delay),
            "staleness": float((delayed_steps - 1) % self.config.delay + 1 if delayed_steps else 0),
        } | ({} if relative is None else {"disagreement": relative})

    def optimizer_state(self, only_on: int | None = None) -> dict[str, Any]:
        state = super().optimizer_state(only_on)
        if self.state.holds_final_weights:
            return state
        whole = self.state.server.optimizer_state(only_on)
        parameters = dict.fromkeys(p for group in self.optimizer.param_groups for p in group["params"])
        return {**state, "state": {index: whole[p] for index, p in enumerate(parameters) if p in whole}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for bucket in self.state.server.buckets:
            bucket.restart()
        super().load_state_dict(state)


def _dampening_of(group: Mapping[str, Any]) -> float:
    """Return a param group's dampening: torch applies it to a momentum only."""
    return float(group.get("dampening", 0.0)) if group.get("momentum") else 0.0

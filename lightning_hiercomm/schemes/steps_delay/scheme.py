"""SSD-SGD: nodes push every gradient but pull the weights only every few steps, and train on meanwhile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_hiercomm.comm.spares import Spares
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes.all_reduce import AllReduce
from lightning_hiercomm.schemes.base import Context, RunningScheme, Scheme
from lightning_hiercomm.schemes.health.verification import words_of
from lightning_hiercomm.schemes.in_place_of_step import Update
from lightning_hiercomm.schemes.optimizer_state import (
    class_names,
    evaluates_loss,
    is_placeholder,
    needs_whole_tensors,
    releases_gradients,
    wraps_another,
)
from lightning_hiercomm.schemes.profile import Profile
from lightning_hiercomm.schemes.reducers.disagreement import Disagreement, sample
from lightning_hiercomm.schemes.steps_delay.rules import (
    LOCAL_RULES,
    LocalRule,
    LocalUpdate,
    glu,
    hold_global_gradient,
    sgd,
)
from lightning_hiercomm.schemes.steps_delay.section import Section, ShardOn
from lightning_hiercomm.schemes.steps_delay.server import ShardedServer

_SUMS = 256


class StepsDelay(Scheme):
    """Send every gradient but fetch the global weights only every ``delay`` steps; neither is waited for.

    A parameter server holds the global weights w and the optimizer's state; it takes one step per iteration, with the
    mean of the nodes' gradients. In iteration n, node m with weights w'_m (k = ``delay``, u counts from the end of
    warm-up)::

        g_m := mean over the node of the gradients at w'_m
        push g_m;  the server steps: w := optimizer(w, sum_m W_m g_m)
        if u % k == 0 and u > 0:  w'_m := the w that was pulled one iteration ago
        w'_m := local rule(w'_m, g_m)                                                                   (Eq. 8)
        if u % k == k - 1:        pull w, including this iteration's gradients

    Push, server step and pull run beside training. A pull is waited for at the end of the next iteration, so it shows
    in the forward pass after the next; a bucket's push is waited for when the next iteration pushes that
    bucket. The first ``warmup_steps`` iterations are synchronous SGD.

    The server is sharded over the ranks (see :class:`~lightning_hiercomm.schemes.steps_delay.server.ShardedServer`),
    so a node sends ``(M - 1) / M * (1 + 1 / k)`` of the model per step, against ``2 (M - 1) / M`` of an all-reduce,
    and every rank holds only its share of the optimizer's state. In return it holds a copy of the model, the weights
    pulled last, and its lane's part of what is under way.

    **Learning rates.** The server uses the user's optimizer: class, param groups, learning rate, momentum and weight
    decay as they are at each step, so schedulers work. The local rule uses ``local_lr_scale`` times the learning
    rate. With momentum m the server moves by ``lr / (1 - m)`` per unit of gradient, and GLU by ``(alpha + beta) *
    local_lr_scale * lr``: by default ``local_lr_scale`` makes the two equal for every momentum, as the paper's
    numbers do for 0.9. torch keeps the learning rate out of the momentum buffer (as MXNet, which the paper uses, does
    not), so after a change of the learning rate old gradients count with the new one.

    **Clipping and fp16.** Both act on the node's mean gradient before it is used or sent: each node clips by its own
    norm, and what the server gets is unscaled. A node whose gradient scaler skips a step sends zeros and keeps its
    weights; the other nodes' gradients still count, and where all skip the server takes a step by zeros. A parameter
    without gradient counts as one with gradient zero, so weight decay and momentum act on it.

    **Not finite.** With ``on_nonfinite="skip"`` a node whose mean gradient is NaN or infinite does the same, and gets
    the server's weights with its next pull. A shard whose gradients are too large for the wire leaves out that step.

    **Weights that you write** outside of the optimizer's step (clamping, masks, a new head) reach the server in the
    warm-up, as under plain SGD: every rank writes the same, and after the step, not in a hook on the optimizer's
    ``step``. Afterwards a device's weights are temporary, and what was written to them says nothing about the server's:
    whoever asks for those next (a pull, a validation, a checkpoint, the end of the run) ends the run with an error.

    **The agreed model** is the server's weights, gathered on demand: for validation, checkpoints and at the end.
    Checkpoints hold the optimizer's state as if there were no shards, so they resume under plain DDP or on any number
    of ranks. The optimizer's ``state`` itself stays empty. Hooks on its ``step`` run once per iteration, before the
    push.

    On one node this is plain data-parallel training.

    Source: Xu et al., "SSD-SGD: Communication Sparsification for Distributed Deep Learning Training", 2021,
    Algorithms 1 and 2.

    Args:
        delay: Steps between pulls, k.
        warmup_steps: Synchronous iterations at the start; a multiple of ``delay``. The paper's wp + 1.
        alpha: Weight of the local gradient in GLU.
        beta: Weight of the global gradient in GLU.
        local_lr_scale: The local learning rate divided by the server's. None fits the rule: for GLU what makes the
            node move as far as the server, ``(1 - dampening) / ((1 - momentum) (alpha + beta))`` of each param group
            (the paper's 4 at momentum 0.9), for ``"sgd"`` the paper's 0.25, otherwise 1 (the paper's for
            ``"dc_asgd"``).
        hold: Keep GLU's global gradient between pulls. False recomputes it from the drifting weights, as in the paper.
        local_update: ``"glu"`` (the optimizer must be SGD), ``"sgd"``, ``"dc_asgd"``, or a function of a
            ``LocalUpdate``.
        shard_on: ``"elements"`` gives every rank an equal share of the server. ``"parameters"`` cuts no tensor, for
            optimizers that need whole ones (LARS, Muon, Adafactor); a rank's share is then at least the largest tensor,
            and a param group moves at once, not bucket by bucket, which takes more memory.

    Raises:
        ValueError: For arguments out of range; and, when it is built, for optimizers that the scheme cannot serve.
        RuntimeError: After the warm-up, at the next pull, look or end after somebody wrote to the weights.
    """

    def __init__(
        self,
        delay: int = 4,
        warmup_steps: int = 500,
        alpha: float = 2.0,
        beta: float = 0.5,
        local_lr_scale: float | None = None,
        hold: bool = False,
        local_update: Literal["glu", "sgd", "dc_asgd"] | LocalRule = "glu",
        shard_on: ShardOn = "elements",
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
        if not callable(local_update) and local_update not in LOCAL_RULES:
            raise ValueError(
                f"local_update={local_update!r} must be one of {', '.join(LOCAL_RULES)}, or a function of a LocalUpdate"
            )
        if shard_on not in ("elements", "parameters"):
            raise ValueError(f"shard_on={shard_on!r} must be 'elements' or 'parameters'")
        self.delay = delay
        self.warmup_steps = warmup_steps
        self.alpha = alpha
        self.beta = beta
        self.local_lr_scale = local_lr_scale
        self.hold = hold
        self.local_update = local_update
        self.shard_on: ShardOn = shard_on

    def build(self, context: Context) -> RunningStepsDelay:
        return RunningStepsDelay(self, context)

    @property
    def profile(self) -> Profile:
        phase = (
            f"Before, in warmup_steps={self.warmup_steps}, a step takes {{seconds}}: warm up until learning rates are"
            " low, with a cosine for 0.8 of the run."
        )
        return replace(
            super().profile,
            needs_whole_parameters=f"{type(self).__name__} keeps the model on servers of its own: use"
            " HierarchicalStrategy, or another scheme",
            shares_optimizer_state=True,
            drift=self.delay + 1,
            first_phase=phase if self.warmup_steps else None,
            period=self.delay,
        )

    def check_run(self, nodes: int, steps_of_epoch: float, steps: float) -> Iterator[str]:
        if 0 < steps <= self.warmup_steps:
            yield (
                f"StepsDelay(warmup_steps={self.warmup_steps}) trains synchronously that long, but the run ends after"
                f" {steps:.0f} optimizer steps: none is delayed. Choose a smaller multiple of delay={self.delay}."
            )

    def next_step(self, steps_of_epoch: int) -> Scheme:
        return AllReduce() if self.warmup_steps else self

    @property
    def rule(self) -> LocalRule:
        """The local rule."""
        return self.local_update if callable(self.local_update) else LOCAL_RULES[self.local_update]

    def local_scale(self, group: Mapping[str, Any]) -> float:
        """The local learning rate of a param group, divided by the server's."""
        if self.local_lr_scale is not None:
            return self.local_lr_scale
        if self.rule is glu:
            kept = 1.0 - float(group.get("momentum", 0.0))
            return (1.0 - _dampening_of(group)) / (kept * (self.alpha + self.beta))
        return 0.25 if self.rule is sgd else 1.0


class RunningStepsDelay(RunningScheme[StepsDelay]):
    """SSD-SGD at work: the server, of which this rank holds a part, and what was pulled from it."""

    def __init__(self, config: StepsDelay, context: Context) -> None:
        super().__init__(config, context)
        self._check(self.required_optimizer)
        self._beside = self.topology.duplicate() if self.topology.num_nodes > 1 else self.topology
        self._background = self.background()
        self._server = self._new_server({})  # none on one node
        self._disagreement = Disagreement()
        self._delayed_steps = 0  # u
        self._has_pulled = False  # weights that the next iteration takes over
        # one per section of the server
        self._pulled: list[Tensor] = []  # pre
        self._parts: list[list[Bucket]] = []  # in which the local rule gets the section
        self._rule_state: list[list[dict[str, Tensor]]] = []  # one per part
        self._left: Tensor | None = None  # the weights' bits after the last delayed step, as sums
        self._shown: Tensor | None = None  # of the agreed weights, where those have taken their place
        self._written = torch.tensor(False)  # whether anybody wrote to them since
        self._holds_final_weights = False
        self._was_warming_up = False
        self._has_warned_of_sparse = False
        self._start_from_replica()

    # ---- life of a run -------------------------------------------------------------------------------------------

    def follow(self, replica: Replica) -> None:
        state = {} if self._server is None else self._whole_optimizer_state(self._server)
        super().follow(replica)
        self._server = self._new_server(state)
        self._start_from_replica()

    def _new_server(self, state: Mapping[Tensor, Mapping[str, Any]]) -> ShardedServer | None:
        """A server of the replica's parameters, with the optimizer's state for them; none on one node."""
        if self.topology.num_nodes == 1:
            return None
        server = ShardedServer(
            self.replica.parameters,
            self.required_optimizer,
            self.topology,
            self._beside.inter,
            self._background,
            self.wire,
            self.config.shard_on,
            self.replica.bucket_bytes,
            lambda mean: self.guard.may_step(mean, self.wire),
        )
        server.take_optimizer_state(state)
        return server

    def begin_run(self, epochs: int | None, steps: int | None) -> None:
        # what a checkpoint put into the user's optimizer belongs to the server
        if self._server is not None and self._server.optimizer.state:
            self._server.take_optimizer_state(self._server.optimizer.state)
            self._server.optimizer.state.clear()

    def before_step(self, last: bool) -> Update | None:
        return None if self._server is None else self._serve

    def _serve(self, optimizer_step: Callable[[], object] | None) -> None:
        """One iteration, in place of the optimizer's step."""
        if self._holds_final_weights:
            self._left, self._holds_final_weights = None, False
        if optimizer_step is not None:
            if hasattr(self.optimizer, "found_inf"):
                raise ValueError(
                    "with fused=True the gradients are unscaled inside the optimizer's kernel, so the server would get"
                    " scaled ones: use fused=False together with a gradient scaler"
                )
            self._make_dense()
            with _without_gradients(self.replica.parameters):
                optimizer_step()  # moves nothing: for hooks, and for schedulers, which check that it is called
        self._was_warming_up = self.phase == "warm-up"
        server = self._server  # not before: a hook that saves may have begun another one
        assert server is not None
        self._iterate(server, has_gradient=optimizer_step is not None and self.guard.has_finite_gradients(self.steps))

    def _make_dense(self) -> None:
        """Replace sparse gradients, of which a server's shards would get one row here and none there, by dense ones."""
        sparse = [p for p in self.replica.parameters if p.grad is not None and p.grad.is_sparse]
        for parameter in sparse:
            parameter.grad = parameter.grad.to_dense()  # type: ignore[union-attr]
        if sparse and not self._has_warned_of_sparse:
            self._has_warned_of_sparse = True
            if self.topology.rank == 0:
                names = ", ".join(self.replica.names.get(id(parameter), "a parameter") for parameter in sparse)
                warnings.warn(
                    f"StepsDelay makes the sparse gradients of {names} dense, and sends them whole: another scheme"
                    " keeps them sparse inside the node, and Embedding(..., sparse=False) saves their conversion",
                    stacklevel=2,
                )

    def after_step(self, last: bool) -> None:
        if self._server is not None and self._was_warming_up:
            self.unsynchronized_steps = 0

    def finish(self) -> None:
        # a checkpoint that is saved after the run finds it where that of any other optimizer is
        state = {} if self._server is None else self._whole_optimizer_state(self._server, only_on=0)
        super().finish()
        self.required_optimizer.state.update(state)
        self._holds_final_weights = True

    # ---- the method ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _iterate(self, server: ShardedServer, has_gradient: bool) -> None:
        """One iteration of Algorithm 1, from the gradient on.

        Args:
            server: The server.
            has_gradient: Whether the parameters hold the node's mean gradient; otherwise it overflowed.
        """
        is_warming_up, has_arrived = self.phase == "warm-up", self._has_pulled
        pulls = is_warming_up or self._delayed_steps % self.config.delay == self.config.delay - 1
        hyperparameters = server.hyperparameters()
        self._take_over_what_was_written(server)
        if pulls:
            self.guard.verify(self.steps)  # first: a fault that makes one rank differ is to be named as such
            self._refuse_what_was_written()
        arrivals: Iterator[Tensor | None] = server.arrivals(self._pulled) if has_arrived else repeat(None)
        for index, section in enumerate(server.sections):
            arrived = next(arrivals)
            server.push(index, hyperparameters, has_gradient, pulls)
            if not is_warming_up:
                self._update_locally(index, section, has_gradient, arrived, server.spares)
            if arrived is not None:
                server.spares.give_back(self._pulled[index])
                self._pulled[index] = arrived  # pre := w', as it arrived
        if pulls:
            server.expect_pulls()
        self._has_pulled = pulls and not is_warming_up
        if is_warming_up:
            for index, weights in enumerate(server.arrivals(self._pulled)):
                server.sections[index].bucket.unpack(weights)
                server.spares.give_back(self._pulled[index])
                self._pulled[index] = weights
        else:
            self._delayed_steps += 1
            self._left = self._bits()
        self._shown = None
        if has_arrived:
            self.unsynchronized_steps = 0
        if is_warming_up or has_arrived:
            self.synchronizations += 1

    def _take_over_what_was_written(self, server: ShardedServer) -> None:
        """Let the server take what somebody wrote to the weights since the last step; after the warm-up, remember it.

        In the warm-up the weights are the server's, so what was written is what the server is to hold. Later they are
        not: taken over as they are, they would undo the other nodes' steps; as a difference, a new head would not be
        what was written, nor a clamped weight within its bounds.
        """
        if self._left is None:
            if not self._delayed_steps and not self._has_pulled:
                server.take_over(self._pulled)
            return
        bits = self._bits()  # nobody waits here to know what they say
        written = (self._left != bits).any()
        if self._shown is not None:
            written &= (self._shown != bits).any()
        self._written = self._written | written

    def _refuse_what_was_written(self) -> None:
        """Where the server is about to take the place of weights that somebody wrote, say so.

        Raises:
            RuntimeError: After the warm-up.
        """
        if bool(self._written) and not self.guard.has_warned_of_difference:
            raise RuntimeError(
                "somebody wrote to the weights outside of the optimizer's step (clamping, a mask, a new head), which"
                " StepsDelay takes over in its warm-up only: afterwards the server's weights are not those of a device."
                f" Give StepsDelay(warmup_steps=...) more steps than the {self.config.warmup_steps} it has, write only"
                " within them, or use another scheme, such as strategy='diloco'"
            )

    def _bits(self) -> Tensor:
        """Sums of all parameters' bits: versions do not count what is written through ``parameter.data``."""
        sums = [each for parameter in self.replica.parameters for each in _sums_of_bits(parameter)]
        return torch.cat(sums) if sums else torch.zeros(0)  # all may be frozen

    def _update_locally(
        self, index: int, section: Section, has_gradient: bool, arrived: Tensor | None, spares: Spares
    ) -> None:
        """Move a section's weights by the local rule, from those that arrived if some did."""
        if not has_gradient and arrived is None:
            return
        settings = self._rule_settings(section)
        is_ascent = self.required_optimizer.param_groups[section.group].get("maximize")
        samples: list[Tensor] = []
        offset = 0
        for part, state in zip(self._parts[index], self._rule_state[index], strict=True):
            here = slice(offset, offset + part.numel)
            with spares.lend(part.numel, part.dtype, part.device) as new:
                in_place = part.view()
                held = part.pack(new()) if in_place is None else in_place
                weights = held if arrived is None else new().copy_(arrived[here])
                if arrived is not None:
                    samples.append(sample(held, offset, section.bucket.numel))
                gradient = part.view(gradients=True) if has_gradient else weights[:0]
                if gradient is None:
                    gradient = part.pack_gradients(new())
                update = LocalUpdate(
                    weights=weights,
                    gradient=-gradient if is_ascent else gradient,
                    taken_at=held,
                    pulled=self._pulled[index][here],
                    has_arrived=arrived is not None,
                    state=state,
                    **settings,
                )
                if has_gradient:
                    self.config.rule(update)
                elif self.config.rule is glu and self.config.hold:  # the others' way does not depend on it
                    hold_global_gradient(update)
                if weights is not in_place:
                    part.unpack(weights)
            offset += part.numel
        if samples and arrived is not None:
            self._disagreement.compare(index, torch.cat(samples), sample(arrived[:offset]), offset)

    def _rule_settings(self, section: Section) -> dict[str, Any]:
        """What the local rule gets besides tensors."""
        group = self.required_optimizer.param_groups[section.group]
        learning_rate = float(group["lr"])
        return {
            "learning_rate": learning_rate,
            "local_learning_rate": self.config.local_scale(group) * learning_rate,
            "momentum": float(group.get("momentum", 0.0)),
            "dampening": _dampening_of(group),
            "weight_decay": float(group.get("weight_decay", 0.0)),
            "delay": self.config.delay,
            "alpha": self.config.alpha,
            "beta": self.config.beta,
            "hold": self.config.hold,
        }

    def _start_from_replica(self) -> None:
        """Start the exchange anew from the replica's values, which are equal on all ranks."""
        if self._server is None:
            return
        self._delayed_steps = 0
        self._has_pulled = False
        self._left, self._shown, self._written = None, None, torch.tensor(False)
        self._pulled = [section.pack() for section in self._server.sections]
        self._parts = [section.bucket.in_cache_sized() for section in self._server.sections]
        self._rule_state = [[{} for _ in parts] for parts in self._parts]
        self._server.restart(self._pulled)

    # ---- the agreed model ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        if self._server is not None:
            self._server.settle(self._has_pulled)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Write the server's weights to the replica, and the mean of the float buffers over all ranks."""
        self.settle()
        server = self._server
        if server is None or self._holds_final_weights:
            return
        self._take_over_what_was_written(server)
        if self._left is not None:
            self.guard.verify(self.steps)
            self._refuse_what_was_written()
        for section, weights in zip(server.sections, server.weights(), strict=True):
            section.bucket.unpack(weights)
        self.guard.average(self.replica.buckets_of_buffers, self.steps)
        self._shown = self._bits()

    @property
    def is_synchronized(self) -> bool:
        if self._server is None or self._holds_final_weights:
            return True
        return self.unsynchronized_steps == 0 and not self.replica.buffers and not self.wire.is_lossy

    # ---- state and what a person may watch -----------------------------------------------------------------------

    @property
    def phase(self) -> str:  # type: ignore[override]
        return "warm-up" if self.steps < self.config.warmup_steps else "delay"

    def next_step(self, steps_of_epoch: int) -> Scheme:
        return AllReduce() if self.phase == "warm-up" else self.config

    def scalars(self) -> dict[str, float]:
        """``phase`` (0 warm-up, 1 delay), ``sync_every``, ``staleness`` and ``disagreement``.

        The staleness is how many of the server's steps the device's weights have not seen, the disagreement how far
        they were from the server's when these last arrived, relative to them, estimated on a few elements.
        """
        staleness = (self._delayed_steps - 1) % self.config.delay + 1 if self._delayed_steps else 0
        values = {
            "phase": float(self.phase == "delay"),
            "sync_every": 1.0 if self.phase == "warm-up" else float(self.config.delay),
            "staleness": float(staleness),
        }
        relative = self._disagreement.relative()
        return values if relative is None else {**values, "disagreement": relative}

    def optimizer_state(self, only_on: int | None = None) -> dict[str, Any]:
        if self._server is None or self._holds_final_weights:
            return super().optimizer_state(only_on)
        whole = self._whole_optimizer_state(self._server, only_on)
        state = self.required_optimizer.state_dict()
        parameters = dict.fromkeys(p for group in self.required_optimizer.param_groups for p in group["params"])
        state["state"] = {index: whole[p] for index, p in enumerate(parameters) if p in whole}
        return state

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._server is not None:
            state["exchange"] = {
                "delayed_steps": self._delayed_steps,
                "has_pulled": self._has_pulled,
                "pulled": [tensor.clone() for tensor in self._pulled],
                "rule": [_joined(states) for states in self._rule_state],
                "server": self._server.state_dict(),
            }
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._server is None:
            return
        self._start_from_replica()
        exchange = state.get("exchange")
        if exchange is None:
            return
        self._delayed_steps = exchange["delayed_steps"]
        self._has_pulled = exchange["has_pulled"]
        for tensor, values in zip(self._pulled, exchange["pulled"], strict=True):
            tensor.copy_(values)
        self._rule_state = [
            _cut({name: value.to(self.replica.device) for name, value in whole.items()}, parts)
            for whole, parts in zip(exchange["rule"], self._parts, strict=True)
        ]
        self._server.load_state_dict(exchange["server"])

    def _whole_optimizer_state(self, server: ShardedServer, only_on: int | None = None) -> dict[Tensor, dict[str, Any]]:
        self.settle()
        return server.optimizer_state(only_on)

    def _check(self, optimizer: Optimizer) -> None:
        kind = type(optimizer).__name__
        if not self.wire.codec.adds:
            raise ValueError(
                "StepsDelay sends gradients and weights as they are or cast: leave wire_dtype out, or use 'bfloat16'"
            )
        if is_placeholder(optimizer):
            return
        if evaluates_loss(optimizer):
            raise ValueError(
                f"StepsDelay cannot serve {kind}, which evaluates the loss several times per step: use another scheme"
            )
        if wraps_another(optimizer):
            raise ValueError(
                f"StepsDelay cannot serve {kind}, which wraps another optimizer, for it makes one of the same class for"
                " every shard: use the wrapped optimizer itself, or another scheme"
            )
        if "sparseadam" in class_names(optimizer):
            raise ValueError(
                f"StepsDelay makes sparse gradients dense, which {kind} does not take: use another optimizer, or scheme"
            )
        if releases_gradients(optimizer):
            raise ValueError(
                f"StepsDelay cannot serve {kind} with gradient_release, which steps inside the backward pass, before"
                " the node's mean gradient is there: make it without gradient_release"
            )
        if len({parameter.data_ptr() for parameter in self.replica.parameters}) < len(self.replica.parameters):
            raise ValueError(
                "StepsDelay cannot serve parameters that share memory (`a.data = b.data`), for its server holds each of"
                " them: tie the parameter itself (`a = b`), so that there is one"
            )
        if any("lr" not in group for group in optimizer.param_groups):
            raise ValueError(f"StepsDelay reads the learning rate from param_groups[...]['lr'], which {kind} lacks")
        is_layerwise = needs_whole_tensors(optimizer)
        if self.config.local_update == "glu" and (is_layerwise or not isinstance(optimizer, SGD)):
            raise ValueError(
                f"local_update='glu' guesses the global gradient from the steps of momentum SGD; those of {kind} are"
                " something else. Use torch.optim.SGD, or choose local_update='sgd', 'dc_asgd' or a function of your"
                " own, with a local_lr_scale that suits it."
            )
        if is_layerwise and self.config.shard_on == "elements":
            raise ValueError(f"{kind} needs whole tensors: use StepsDelay(..., shard_on='parameters')")


def _sums_of_bits(tensor: Tensor) -> list[Tensor]:
    """A few sums of a tensor's bits, each over neighbours, in one read of it; of what is left over the bits themselves.

    They are those of 64 bits: of 32, half of a thousand numbers is the same as all of them. What changes places among
    so many neighbours is not seen.
    """
    words, rest = words_of(tensor)
    in_sums = words.numel() // _SUMS * _SUMS
    sums = [words[:in_sums].view(_SUMS, -1).sum(1)] if in_sums else []
    return [*sums, words[in_sums:], rest.long()]


@contextmanager
def _without_gradients(parameters: list[Tensor]) -> Iterator[None]:
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _joined(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """A copy of a rule's state of a whole section: checkpoints do not depend on how it is cut."""
    tensors = {name: [state[name] for state in states] for name in states[0]} if states else {}
    return {name: torch.cat(parts) if parts[0].dim() else parts[0].clone() for name, parts in tensors.items()}


def _cut(whole: Mapping[str, Tensor], parts: Sequence[Bucket]) -> list[dict[str, Tensor]]:
    """The inverse of :func:`_joined`."""
    lengths = [part.numel for part in parts]
    tensors = {name: values.split(lengths) if values.dim() else [values] * len(parts) for name, values in whole.items()}
    return [{name: values[place].clone() for name, values in tensors.items()} for place in range(len(parts))]


def _dampening_of(group: Mapping[str, Any]) -> float:
    """Of a param group: torch dampens what goes into a momentum, and nothing where there is none."""
    return float(group.get("dampening", 0.0)) if group.get("momentum") else 0.0

"""Uses of private parts of ``DistributedDataParallel``: one function each, with its reason."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_hiercomm._lightning import require_attribute
from lightning_hiercomm._lightning.tree import fabric
from lightning_hiercomm.nodes.ignored import NAMES, ignored_by_ddp

Backward = TypeVar("Backward", bound=Callable[..., Any])


def is_not_insisted_on(backward: Backward) -> Backward:
    """Keep Fabric from refusing backward passes that do not use a strategy's own ``backward``.

    Otherwise it also refuses ``torch.autograd.grad`` of a model's outputs, for forces or gradient penalties.
    """
    return functools.wraps(fabric.strategies.strategy.Strategy.backward)(backward)  # type: ignore[return-value]


def explain_unused_parameters(exception: BaseException, module: nn.Module | None) -> None:
    """Replace the text of DDP's error about parameters without gradient: name them and this strategy's argument.

    Lightning's text names its own ``DDPStrategy``.
    """
    if not any("Expected to have finished reduction in the prior iteration" in str(arg) for arg in exception.args):
        return
    trained = [] if module is None else [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    unused = [name for name, parameter in trained if parameter.grad is None]
    more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
    names = f": {', '.join(unused[:5])}{more}" if 0 < len(unused) < len(trained) else ""
    exception.args = (
        "It looks like your LightningModule has parameters that were not used in producing the loss returned by"
        f" training_step{names}. If this is intentional, you must enable the detection of unused parameters in DDP, by"
        " setting the flag in the strategy with `strategy=HierarchicalStrategy(find_unused_parameters=True)`.",
    )


def keep_sync_batchnorm_in_group(module: nn.Module, group: Any) -> None:
    """Point SyncBatchNorm layers at a process group; Lightning, and torch by default, convert them over the world."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.SyncBatchNorm):
            layer.process_group = group


class CopiedDDP(DistributedDataParallel):
    """DDP whose ``deepcopy`` is a copy of its module, for averages of the weights.

    DDP itself cannot be copied over a process group that is not the default one, such as that of a node.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied: nn.Module = copy.deepcopy(self.module, memo)
        return copied

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Raise an error: DDP has one hook, which the strategy uses (:func:`register_bucket_hook`)."""
        name = getattr(hook, "__name__", repr(hook))
        raise ValueError(
            f"register_comm_hook({name}): DDP has one communication hook, and the hierarchical strategy averages"
            " gradients by it. Leave yours out, and choose what nodes exchange with `scheme` and `wire_dtype`."
        )

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.register_comm_hook(None, comm_hook_type)


class Unshared(nn.Module):
    """Wraps a module whose gradients no other rank shares, with what programs call on ``trainer.model`` under DDP.

    A real DDP over one rank would take time for its buckets, and would refuse unused parameters, and modules without
    trainable ones.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet
                raise
            return getattr(self.module, name)  # for programs of one rank, to which `trainer.model` is the module

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied: nn.Module = copy.deepcopy(self.module, memo)
        return copied

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self._modules["module"](*inputs, **keywords)  # type: ignore[misc]  # faster than `self.module`

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: no gradients are averaged."""
        yield

    @contextmanager
    def join(self, *_: object, **__: object) -> Iterator[None]:
        """Do nothing: no other rank waits for this one's gradients."""
        yield


class SettledDDP(CopiedDDP):
    """DDP whose steps do not depend on earlier steps of its process, so that resumed runs are equal to the bit.

    Its buckets depend on the module alone from the first step on.

    DDP starts with one bucket and rebuilds its buckets after the first backward pass, in the order of the gradients. So
    a resumed process takes its first step with other buckets than an uninterrupted run. Then results that depend on an
    element's position in its bucket differ: sums of three ranks and more, blocks of narrow types, and error-feedback
    residuals. This class builds the final buckets at once, in the reverse order of the parameters. If gradients are
    computed in another order, a bucket is sent later.

    With ``find_unused_parameters`` DDP never rebuilds its buckets. With ``static_graph`` it does so after the second
    pass, and needs one bucket in the first. Both keep DDP's behavior.

    This class also broadcasts buffers before every pass that begins a step. DDP does not in the step after a
    validation, nor in Lightning's manual optimization after the first step, but always in the first step of a process.
    """

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        self._begins_step = True
        self._is_settled = not (arguments.get("static_graph") or arguments.get("find_unused_parameters"))
        super().__init__(module, **arguments)
        if not self._is_settled:
            return
        require_attribute(self.reducer, "_push_all_rebuilt_params")
        require_attribute(self.reducer, "_rebuild_buckets")
        self.reducer._push_all_rebuilt_params()  # in its own order
        self._has_rebuilt_buckets = self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, are_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return (parameters[::-1], are_sparse[::-1]) if self._is_settled else (parameters, are_sparse)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """As in DDP, except for when buffers are broadcast."""
        learns, ends_step = torch.is_grad_enabled(), self.require_backward_grad_sync
        if learns:
            self.require_forward_param_sync = self._begins_step
        output = super().forward(*inputs, **keywords)  # type: ignore[no-untyped-call]
        if learns:
            # as it was before: Lightning's manual optimization turns it off inside
            self._begins_step = self.require_forward_param_sync = ends_step
        return output


def in_ddp(
    module: nn.Module,
    device_ids: list[int] | None,
    arguments: Mapping[str, Any],
    settled: bool,
    ignored: Collection[str] = (),
) -> DistributedDataParallel:
    """Wrap a module in DDP, on a separate CUDA stream as torch's notes recommend.

    Args:
        module: The module that trains.
        device_ids: As in DDP.
        arguments: Other arguments of DDP.
        settled: Whether to use :class:`SettledDDP`; otherwise results equal those of DDP to the bit.
        ignored: Names of further buffers that are never broadcast, because their shapes differ between ranks.
    """
    kind = SettledDDP if settled else CopiedDDP
    with _ignoring(module, ignored):
        if device_ids is None:
            return kind(module, device_ids=None, **arguments)
        here, side_stream = torch.cuda.current_stream(), torch.cuda.Stream()
        side_stream.wait_stream(here)  # DDP sends what has just been made equal
        with torch.cuda.stream(side_stream):
            wrapped = kind(module, device_ids=device_ids, **arguments)
        here.wait_stream(side_stream)
        return wrapped


@contextmanager
def _ignoring(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Inside, DDP's constructor ignores more tensors of a module than the user has named."""
    before = vars(module).get(NAMES)
    # not other names of a tied parameter: DDP averages its gradient, unless the user lists all its names
    if further := {*names} - ignored_by_ddp(module):
        vars(module)[NAMES] = {*getattr(module, NAMES, ()), *further}
    try:
        yield
    finally:
        if before is not None:
            vars(module)[NAMES] = before
        else:
            vars(module).pop(NAMES, None)


def register_bucket_hook(model: DistributedDataParallel, reduce: Callable[[Any], Future[Tensor]]) -> None:
    """Register ``reduce`` as communication hook. DDP compares the annotated types themselves, not their names."""

    def hook(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
        return reduce(bucket)

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": Future[Tensor]}
    DistributedDataParallel.register_comm_hook(model, None, hook)


class FabricSyncControl(fabric.strategies.strategy._BackwardSyncControl):
    """``Fabric.no_backward_sync``, also for a module without DDP on a node of one rank."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if enabled and isinstance(module, DistributedDataParallel):
            context: AbstractContextManager[None] = module.no_sync()
            return context
        return nullcontext()


def time_buffer_broadcasts(model: DistributedDataParallel, waiting: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter ``waiting()`` while DDP broadcasts buffers, before each forward pass: it has no hook for that."""
    require_attribute(model, "_sync_buffers")
    original: Callable[[], None] = model._sync_buffers

    def sync_buffers() -> None:
        with waiting():
            original()

    model.__dict__["_sync_buffers"] = sync_buffers


def forward_nothing(model: nn.Module | None) -> None:
    """Take part in the broadcast of buffers in other ranks' forward passes; DDP does this only inside of ``join``."""
    if not isinstance(model, SettledDDP):
        return
    require_attribute(model, "_check_sync_bufs_pre_fwd")
    model.require_forward_param_sync = model._begins_step
    if model._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
        model._sync_buffers()  # type: ignore[no-untyped-call]
    model._begins_step = model.require_forward_param_sync = model.require_backward_grad_sync


@torch.no_grad()
def average_present_gradients(model: nn.Module | None, factor: float = 1.0) -> None:
    """Average the present gradients over DDP's ranks without a backward pass; a missing gradient counts as zero.

    Other ranks of the group may average theirs in a backward pass. DDP's ``join`` does the same with zeros.

    Args:
        model: The model; nothing happens if it is not wrapped in DDP.
        factor: This rank's gradients are multiplied by it.
    """
    if not isinstance(model, SettledDDP):
        return
    require_attribute(model.reducer, "_get_zeros_like_grad_buckets")
    require_attribute(model.reducer, "_run_comm_hook")
    reduced = []
    for bucket in model.reducer._get_zeros_like_grad_buckets():
        for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter.grad is not None:
                part.copy_(parameter.grad).mul_(factor)
        reduced.append((bucket, model.reducer._run_comm_hook(bucket)))
    for bucket, future in reduced:
        future.wait()
        for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter.grad is None:
                parameter.grad = part.view_as(parameter).clone()
            else:
                parameter.grad.copy_(part.view_as(parameter))

"""The server of StepsDelay: sharded over all ranks, it steps and saves as one process would."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import TWO_BY_TWO, Rank, on_nodes, place, reloaded, steps
from problems import train_with_momentum as train
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes import StepsDelay

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one


@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1,), (2,))])
def test_optimizer_state_is_shared_out_among_the_ranks(nodes):
    held = []

    def work(run: Rank) -> None:
        steps(3)(run)
        run.scheme.state.settle()
        shards = run.scheme.state_dict()["server"]
        momenta = [owned["momentum_buffer"] for shard in shards for owned in shard["optimizer"]]
        held.append((run.rank, sum(momentum.numel() for momentum in momenta)))
        assert not run.optimizer.state

    train(work, StepsDelay(1, 0), nodes=nodes, shapes=((6, 5), (10,), (10,), (10,)))
    owners = min(map(len, nodes)) * len(nodes)
    assert sum(numel for _, numel in held) == 60
    assert sorted(numel for _, numel in held)[-owners:] == [60 // owners] * owners


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    lambda p: torch.optim.SGD([{"params": p[:1], "lr": 0.2}, {"params": p[1:], "momentum": 0.5}], lr=0.1),
]


def alone(
    optimizer: Any, shapes: Sequence[tuple[int, ...]], number: int, gradient: Callable[[Tensor, int], Tensor]
) -> tuple[list[float], torch.optim.Optimizer]:
    """Take steps in one process, with the mean gradient of all ranks; the values, and the optimizer."""
    of_zeros = {"dtype": torch.float64, "device": place.device}  # on a GPU, ASGD rounds its steps otherwise
    parameters = [torch.nn.Parameter(torch.zeros(shape, **of_zeros)) for shape in shapes]
    own = optimizer(parameters)
    for _ in range(number):
        for index, parameter in enumerate(parameters):
            parameter.grad = gradient(parameter.detach(), index)
        own.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters]).tolist(), own


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bucket_bytes", [8 * 5, 2**22])
def test_server_steps_and_saves_state_like_the_users_optimizer(optimizer, bucket_bytes):
    shapes = ((4, 3), (2, 5), (1, 1))

    def work(run: Rank) -> tuple[list[float], dict[str, Any]]:
        steps(5)(run)
        return run.values.tolist(), run.scheme.optimizer_state()

    results = train(
        work,
        StepsDelay(1, 10, local_update="sgd"),
        nodes=TWO_BY_TWO,
        shapes=shapes,
        dtype=torch.float64,
        inner=optimizer,
        bucket_bytes=bucket_bytes,
    )
    generators = [torch.Generator().manual_seed(rank) for rank in range(4)]
    goals = [
        (sum(torch.randn(tuple(shape), generator=g, dtype=torch.float64) for g in generators) / 4).to(place.device)
        for shape in shapes
    ]
    whole, one = alone(optimizer, shapes, 5, lambda p, index: p - goals[index])
    expected = one.state_dict()
    for values, state in results:
        assert values == pytest.approx(whole, abs=1e-7)
        assert state["param_groups"] == expected["param_groups"]
        assert state["state"].keys() == expected["state"].keys()
        for index, held in expected["state"].items():
            assert state["state"][index].keys() == held.keys()
            for name, value in held.items():
                here = torch.as_tensor(value).cpu()
                assert torch.allclose(torch.as_tensor(state["state"][index][name]), here, atol=1e-7)


class NewTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that this thread makes inside, and the most of them that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._seen = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and id(storage) not in given and storage not in self._seen:
                self._seen.add(storage)
                weakref.finalize(storage, self._ended, storage.nbytes())
                self.alive += storage.nbytes()
                self.peak = max(self.peak, self.alive)
        return result

    def _ended(self, nbytes: int) -> None:
        self.alive -= nbytes


@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1,), (2,))])
def test_optimizer_state_for_one_rank_takes_little_memory_on_others(nodes):
    part = 2**16
    shapes = ((2**13,),) * 48  # 24 parts
    model = 24 * part
    pending = 20 * part  # threads keep messages until the slowest rank has received them

    def work(run: Rank) -> tuple[dict[str, Any], dict[str, Any], int]:
        steps(3)(run)
        everywhere = run.scheme.optimizer_state()
        with NewTensors() as new:
            state = run.scheme.optimizer_state(only_on=1)
        return everywhere, state, new.peak

    results = on_nodes(
        work,
        StepsDelay(1, 0, local_update="sgd"),
        nodes,
        shapes=shapes,
        inner=partial(torch.optim.Adam, lr=0.1),
        bucket_bytes=part,
    )
    for rank, (everywhere, state, peak) in enumerate(results):
        assert state["param_groups"] == everywhere["param_groups"]
        if rank == 1:
            assert state["state"].keys() == everywhere["state"].keys()
            for index, held in everywhere["state"].items():
                assert all(torch.equal(state["state"][index][name], value) for name, value in held.items())
            assert 2 * model <= peak <= 2 * model + pending
        else:
            assert state["state"] == {}
            assert peak <= pending < model


def test_a_small_model_is_sent_in_several_buckets():
    def numels(run: Rank) -> list[int]:
        return [bucket.bucket.numel for bucket in run.scheme.state.server.buckets]

    shapes, scheme = ((1024, 1024), (1,)), StepsDelay(1, 10, local_update="sgd")
    (cut,) = set(map(tuple, train(numels, scheme, nodes=((0,), (1,)), shapes=shapes)))
    assert len(cut) >= 8
    assert sum(cut) == 1024 * 1024 + 1
    (small,) = set(map(tuple, train(numels, scheme, nodes=((0,), (1,)), shapes=((10, 10),))))
    assert small == (100,)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD])
def test_a_plain_checkpoint_resumes_on_another_number_of_ranks(optimizer):
    """NAdam and ASGD count in more numbers than ``step``; a parameter of one number has as many of each."""
    shapes, saved = ((4, 3), (), (), (6,)), {}

    inner = partial(optimizer, lr=0.1)

    def first(run: Rank) -> None:
        for _ in range(4):
            run.train(gradient=1.0 + run.topology.node)
        state, values = run.scheme.optimizer_state(), run.averaged().tolist()
        if run.rank == 0:
            saved.update(optimizer=reloaded(state), values=values)

    def resumed(run: Rank) -> list[float]:
        with torch.no_grad():
            flat = torch.tensor(saved["values"], dtype=torch.float64).to(place.device)
            for p, values in zip(run.parameters, flat.split([12, 1, 1, 6]), strict=True):
                p.copy_(values.view(p.shape))
        run.scheme.follow(Replica(run.parameters))
        run.optimizer.load_state_dict(saved["optimizer"])
        run.scheme.load_state_dict({**run.scheme.state_dict(shared=True), "steps": 4})
        run.scheme.begin_run(1, None)
        for _ in range(3):
            run.train(gradient=1.5)
        return run.values.tolist()

    scheme = StepsDelay(1, 100, local_update="sgd")
    train(first, scheme, nodes=TWO_BY_TWO, shapes=shapes, inner=inner)
    results = train(resumed, scheme, nodes=((0,), (1,), (2,)), shapes=shapes, inner=inner)
    expected, _ = alone(inner, shapes, 7, lambda p, _: torch.full_like(p, 1.5))
    near = 1e-9 if optimizer is torch.optim.NAdam else 1e-12  # its float32 becomes float64 where torch loads it
    assert results[0] == pytest.approx(expected, abs=near)


def test_a_resume_with_another_delay_goes_on_from_weights_not_gradients():
    saved: dict[int, Any] = {}

    def first(run: Rank) -> None:
        steps(6)(run)  # between two pulls, but at one if the delay were 3
        run.scheme.state.settle()
        saved[run.rank] = reloaded({"values": run.scheme.replica.snapshot(), "scheme": run.scheme.state_dict()})

    def resumed(run: Rank) -> Rank:
        run.scheme.replica.restore(saved[run.rank]["values"])
        run.scheme.load_state_dict(saved[run.rank]["scheme"])
        return steps(1)(run)

    train(first, StepsDelay(4, 0), targets=(100.0, 100.0))
    for run in train(resumed, StepsDelay(3, 0), targets=(100.0, 100.0)):
        assert 0 < run.trace[0][0] < 40  # the gradients were about -100


def test_a_narrow_wire_loses_no_small_updates():
    runs = train(
        lambda run: [run.train(gradient=1.0) for _ in range(100)] and run,
        StepsDelay(2, 200),
        nodes=TWO_BY_TWO,
        dtype=torch.float32,
        inner=lambda p: torch.optim.SGD(p, lr=1e-3),
        wire=Wire(torch.bfloat16),
    )
    for run in runs:
        assert run.values.tolist() == pytest.approx([-0.1], abs=1e-6)
        # every node holds the same, within what one difference of the last pull rounds away
        assert run.trace[-1] == runs[0].trace[-1]
        assert run.trace[-1] == pytest.approx([-0.1], abs=1e-5)


class Communicating(torch.optim.SGD):
    """Communicates in its step."""

    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        return super().step(closure)


def test_optimizer_that_communicates_is_refused_by_name(process_group):
    with pytest.raises(ValueError, match=r"serve Communicating.* its step communicates .* Use AllReduce\(\)"):
        train(steps(4), StepsDelay(2, 2), inner=partial(Communicating, lr=0.1))

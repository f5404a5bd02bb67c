"""What runs the schemes, on threads and without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import pytest
import torch
from harness import on_ranks, place
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_hiercomm.comm.dtensor import DTensor
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.losses import common_loss
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import DASO, AllReduce, DiLoCo, Gossip, PeriodicAveraging, Scheme, StepsDelay

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

T = TypeVar("T")


class Pair(nn.Module):
    """Two scalars, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.second = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.second.weight)


@contextmanager
def begun(run: TrainingRun) -> Iterator[TrainingRun]:
    """The run in its first epoch."""
    try:
        run.begin(epochs=1, steps=None)
        run.begin_epoch(0, dict)
        yield run
    finally:
        run.close(timeout=5.0)


def on_two_nodes(scheme: Callable[[], Scheme], work: Callable[[TrainingRun], T]) -> list[T]:
    """``work(run)`` on two nodes of one rank, with a run that has begun."""

    def body(topology: Topology) -> T:
        module = Pair().to(place.device)
        optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (module.first, module.second)]
        with begun(TrainingRun(scheme(), Replicas(module, optimizers), topology)) as run:
            return work(run)

    return on_ranks(body, [[0], [1]])


def add(run: TrainingRun, which: int, amount: float) -> None:
    """A step of one optimizer that adds ``amount`` to everything it trains."""
    optimizer = run.optimizers[which]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, -amount)
    run.step(optimizer, optimizer.step)


def test_every_optimizer_has_a_scheme_that_counts_its_own_steps():
    def work(run: TrainingRun) -> list[float]:
        mine = run.topology.rank + 1.0
        add(run, 0, mine)
        add(run, 0, mine)
        add(run, 1, mine)
        return [run.module.first.weight.item(), run.module.second.weight.item()]

    assert on_two_nodes(lambda: PeriodicAveraging(2), work) == [[3.0, 1.0], [3.0, 2.0]]


def test_nested_visits_to_the_averaged_model_end_where_training_was():
    def work(run: TrainingRun) -> list[float]:
        weight = run.module.first.weight
        add(run, 0, run.topology.rank + 1.0)
        seen = [weight.item()]
        with run.averaged_model():
            seen.append(weight.item())
            run.averaged_model.enter()  # as validation does, between two hooks
            seen.append(weight.item())
            run.averaged_model.leave()
            seen.append(weight.item())
            seen.append(run.averaged_model.own_values()[id(weight)].item())
        return [*seen, weight.item()]

    assert on_two_nodes(lambda: PeriodicAveraging(5), work) == [
        [1.0, 1.5, 1.5, 1.5, 1.0, 1.0],
        [2.0, 1.5, 1.5, 1.5, 2.0, 2.0],
    ]


def test_buffer_is_averaged_again_once_it_is_finite_everywhere():
    def body(topology: Topology) -> list[float]:
        module = Pair()
        module.register_buffer("best", torch.tensor(torch.inf))
        module.register_buffer("mask", torch.full((2,), -torch.inf))
        optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (module.first, module.second)]
        with begun(TrainingRun(PeriodicAveraging(1), Replicas(module, optimizers), topology)) as run:
            seen = []

            def look(own: float) -> None:
                module.best.fill_(own)
                for which in (0, 1):
                    add(run, which, 1.0)  # both synchronize, so nothing but the buffer differs
                with run.averaged_model():
                    seen.append(module.best.item())
                seen.append(module.best.item())

            look(3.0 if topology.rank == 0 else torch.inf)
            look(topology.rank + 1.0)
            run.finish()
            run.averaged_model.average_module()
            assert module.mask.isneginf().all()
            return [*seen, module.best.item()]

    inf = torch.inf
    assert on_ranks(body, [[0], [1]]) == [[3.0, 3.0, 1.5, 1.0, 1.5], [inf, inf, 1.5, 2.0, 1.5]]


def test_whether_a_buffer_has_a_mean_is_decided_when_training_begins():
    def body(topology: Topology) -> list[float]:
        module = Pair()
        module.register_buffer("filled", torch.tensor(torch.nan))
        module.register_buffer("partly", torch.tensor(torch.nan))
        module.register_buffer("mask", torch.zeros(2))
        optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (module.first, module.second)]
        replicas = Replicas(module, optimizers)
        run = TrainingRun(PeriodicAveraging(1), replicas, topology, on_nonfinite="raise")
        module.filled.fill_(1.0 + topology.rank)
        module.mask.fill_(-torch.inf)
        if topology.rank == 0:
            module.partly.fill_(1.0)
        with begun(run):
            for which in (0, 1):
                add(run, which, 1.0)
            assert module.mask.isneginf().all()
            assert replicas.without_mean == {"partly", "mask"}
            return module.filled.item()

    assert on_ranks(body, [[0], [1]]) == [1.5, 1.5]


LOWEST = torch.finfo(torch.float32).min
MASKS = {
    "infinite": torch.full((6, 6), -torch.inf).triu(1),
    "lowest": torch.full((6, 6), LOWEST).triu(1),
    "half": torch.full((6, 6), 0.49 * LOWEST).triu(1),  # whose sum overflows
    "lowest of bfloat16": torch.full((6, 6), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16).triu(1),
    "float64": torch.full((6, 6), -1e308, dtype=torch.float64).triu(1),
}


def _sent_with(mask: torch.Tensor | None, scheme: Scheme, wire: Wire) -> list[dict[str, float]]:
    """Bytes of four steps on two nodes, with a buffer and a look at the averaged model."""

    def body(topology: Topology) -> dict[str, float]:
        module = nn.BatchNorm1d(50).to(place.device)
        module.register_buffer("mask", None if mask is None else mask.to(place.device, copy=True))
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        with begun(TrainingRun(scheme, Replicas(module, [optimizer]), topology, wire, on_nonfinite="raise")) as run:

            def step() -> None:
                module.running_mean += topology.rank
                for parameter in module.parameters():
                    parameter.grad = torch.full_like(parameter, 0.25 * (topology.rank + 1))
                optimizer.step()

            for _ in range(4):
                run.step(optimizer, step)
            with run.averaged_model():
                assert mask is None or torch.equal(module.mask.cpu(), mask)
            run.finish()
            assert mask is None or torch.equal(module.mask.cpu(), mask)
            return topology.meter.snapshot()

    return on_ranks(body, [[0], [1]])


@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
@pytest.mark.parametrize("scheme", [PeriodicAveraging(2), DiLoCo(2), Gossip(fragments=2)], ids=repr)
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_travels_on_no_wire_and_makes_nothing_travel_twice(mask, scheme, wire):
    plain, masked = (_sent_with(each, scheme, Wire.named(wire)) for each in (None, MASKS[mask]))
    for own, with_mask in zip(plain, masked, strict=True):
        assert with_mask["inter_bytes"] == own["inter_bytes"]
        assert 0 <= with_mask["world_bytes"] - own["world_bytes"] <= 64  # one number of it is compared at a look


def test_averaging_between_forward_and_backward_keeps_gradients():
    def body(topology: Topology) -> list[list[float]]:
        module = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).to(place.device)
        teacher = nn.Parameter(torch.ones(1, device=place.device), requires_grad=False)
        module.register_parameter("teacher", teacher)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1.0)
        data = topology.rank + torch.arange(4.0, device=place.device)[:, None]
        with begun(TrainingRun(PeriodicAveraging(5), Replicas(module, [optimizer]), topology)) as run:
            add(run, 0, 0.1 * topology.rank)
            teacher += topology.rank
            found = []
            for looks in (False, True):
                loss = (module.teacher * module(data)).square().mean()
                if looks:
                    with run.averaged_model():
                        assert teacher.item() == 1.5
                optimizer.zero_grad()
                loss.backward()
                found.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.requires_grad]).tolist())
        return found

    for without, with_validation in on_ranks(body, [[0], [1]]):
        assert with_validation == without


def test_end_of_run_averages_float_buffers_and_keeps_counters():
    def body(topology: Topology) -> list[object]:
        module = Pair().to(place.device)
        module.phase = nn.Parameter(torch.tensor([1j * topology.rank], device=place.device), requires_grad=False)
        module.count = nn.Parameter(torch.tensor([5 + topology.rank], device=place.device), requires_grad=False)
        module.register_buffer("spectrum", torch.zeros(1, dtype=torch.complex128, device=place.device))
        module.register_buffer("turned", torch.tensor([1j], device=place.device).conj())
        optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (module.first, module.second)]
        with begun(TrainingRun(PeriodicAveraging(1), Replicas(module, optimizers), topology)) as run:
            module.phase.data += 1j * topology.rank
            add(run, 0, 1.0)
            module.spectrum += 1j * topology.rank
            with run.averaged_model():
                seen = [each.item() for each in (module.phase, module.count, module.spectrum)]
            run.finish()
            run.averaged_model.average_module()
        return [*seen, *(each.item() for each in (module.phase, module.count, module.spectrum))]

    assert on_ranks(body, [[0], [1]]) == [[1j, count, 0.5j] * 2 for count in (5, 6)]


@pytest.mark.parametrize("scheme", [StepsDelay(2, 2), PeriodicAveraging(2)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_train_as_their_real_and_imaginary_parts_do(scheme, dtype):
    def trained(topology: Topology, is_complex: bool) -> list[float]:
        module = nn.Module()
        values = torch.zeros(3, dtype=dtype, device=place.device)
        module.weight = nn.Parameter(values if is_complex else torch.view_as_real(values))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with begun(TrainingRun(scheme, Replicas(module, [optimizer]), topology)) as run:
            for step in range(6):
                weight = module.weight if is_complex else torch.view_as_complex(module.weight)
                target = torch.tensor([1 + step, 1j * topology.rank, 2 - 3j], dtype=dtype, device=place.device)
                (weight - target).abs().square().sum().backward()
                run.step(optimizer, lambda: optimizer.step())
                optimizer.zero_grad()
            run.finish()
            return torch.view_as_real(module.weight.detach()).tolist() if is_complex else module.weight.tolist()

    def body(topology: Topology) -> list[list[float]]:
        return [trained(topology, is_complex) for is_complex in (True, False)]

    for is_complex, is_real in on_ranks(body, [[0], [1]]):
        torch.testing.assert_close(torch.tensor(is_complex), torch.tensor(is_real))


def test_leaving_the_averaged_model_without_having_entered_changes_nothing():
    def work(run: TrainingRun) -> float:
        add(run, 0, run.topology.rank + 1.0)
        run.averaged_model.leave()
        return run.module.first.weight.item()

    assert on_two_nodes(lambda: PeriodicAveraging(5), work) == [1.0, 2.0]


@pytest.mark.parametrize("scheme", [lambda: PeriodicAveraging(5), lambda: Gossip(fragments=1, hierarchical=False)])
def test_nodes_restart_from_their_average_when_parameters_are_added(scheme):
    def work(run: TrainingRun) -> tuple[float, bool, bool]:
        add(run, 0, run.topology.rank + 1.0)
        own = run.schemes[0]
        threads = list(own.backgrounds)
        extra = nn.Parameter(torch.zeros(1, device=place.device))
        run.module.register_parameter("extra", extra)
        run.optimizers[0].add_param_group({"params": [extra]})
        add(run, 0, 0.0)
        with run.averaged_model():
            averaged = run.module.first.weight.item()
        return averaged, any(t is extra for t in own.replica.parameters), own.backgrounds == threads

    everyone = on_two_nodes(scheme, work)
    assert [averaged for averaged, _, _ in everyone] == [1.5, 1.5]
    assert all(knows_new and keeps_threads for _, knows_new, keeps_threads in everyone)


def test_values_written_into_the_module_are_averaged():
    def work(run: TrainingRun) -> list[float]:
        with torch.no_grad():
            run.module.second.weight.fill_(run.topology.rank)
        run.averaged_model.average_module()
        run.begin_from_module()
        return [run.module.second.weight.item(), run.schemes[1].state.unsynchronized_steps]

    assert on_two_nodes(lambda: PeriodicAveraging(5), work) == [[0.5, 0], [0.5, 0]]


def test_parameter_writes_on_any_rank_are_noticed_on_all():
    def work(run: TrainingRun) -> list[bool]:
        noticed = [run.values_have_changed()]
        if run.topology.rank == 1:
            run.module.second.weight.data.fill_(0.5)
        noticed.append(run.values_have_changed())
        run.remember_values()
        return [*noticed, run.values_have_changed()]

    assert on_two_nodes(lambda: PeriodicAveraging(5), work) == [[False, True, False]] * 2


def test_replaced_optimizer_is_refused_with_a_remedy():
    def work(run: TrainingRun) -> None:
        fresh = torch.optim.SGD(run.module.first.parameters(), lr=1.0)
        run.step(fresh, fresh.step)

    with pytest.raises(RuntimeError, match="this SGD is none of the optimizers with which the run began"):
        on_two_nodes(lambda: PeriodicAveraging(2), work)


def test_buffers_are_averaged_by_the_optimizer_that_trains_their_layer():
    module = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(3), nn.BatchNorm1d(4, affine=False)])
    optimizers = [torch.optim.SGD(module[0].parameters(), lr=1.0), torch.optim.SGD(module[1].parameters(), lr=1.0)]
    replicas = Replicas(module, optimizers)
    # the layer without parameters goes to the first; counts of batches are integers
    assert [b.numel() for b in replicas.of(optimizers[0]).buffers] == [2, 2, 4, 4]
    assert [b.numel() for b in replicas.of(optimizers[1]).buffers] == [3, 3]
    assert not Replicas(module, optimizers, average_buffers=False).of(optimizers[0]).buffers
    named = Replicas(module, optimizers, average_buffers=["[02].running_mean", "*var"])
    named.check_names()
    assert named.of(optimizers[0]).buffers == [module[0].running_mean, module[0].running_var, *named_of(module[2])]
    assert named.of(optimizers[1]).buffers == [module[1].running_var]
    assert len(named.whole().buffers) == len([*module.parameters()]) + 5


def named_of(layer: nn.BatchNorm1d) -> list[torch.Tensor]:
    return [layer.running_mean, layer.running_var]


def test_a_name_that_no_buffer_has_is_refused_with_those_that_there_are():
    replicas = Replicas(nn.BatchNorm1d(2), [], average_buffers=["running_mean", "queue"])
    with pytest.raises(ValueError, match=r"no float buffer .* like 'queue'\. They are running_mean, running_var"):
        replicas.check_names()


class Assigning(nn.Module):
    """A layer whose statistics are another tensor after each forward pass, as many are written."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("before", torch.zeros(2))
        self.register_buffer("computed", torch.zeros(2), persistent=False)

    def see(self, value: float) -> None:
        self.before = self.mean
        self.mean = (self.weight + value).expand(2)  # of a graph, and one element in two places
        self.computed = torch.full((2,), value)


def assigning(scheme: Scheme, work: Callable[[TrainingRun], T]) -> list[T]:
    """``work(run)`` on two nodes, with an :class:`Assigning` under each of two optimizers."""

    def body(topology: Topology) -> T:
        module = nn.ModuleList([Assigning(), Assigning()]).to(place.device)
        optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in module]
        with begun(TrainingRun(scheme, Replicas(module, optimizers, bucket_bytes=12), topology)) as run:
            return work(run)

    return on_ranks(body, [[0], [1]])


def see_and_step(run: TrainingRun, value: float) -> None:
    for layer, optimizer in zip(run.module, run.optimizers, strict=True):

        def step(layer: nn.Module = layer, optimizer: torch.optim.Optimizer = optimizer) -> None:
            layer.see(value + run.topology.rank)
            layer.weight.grad = torch.zeros_like(layer.weight)
            optimizer.step()

        run.step(optimizer, step)


def test_reassigned_buffers_synchronize_unless_non_persistent():
    def work(run: TrainingRun) -> list[list[float]]:
        seen = []
        for value in (1.0, 3.0):
            see_and_step(run, value)
            layer = run.module[1]
            seen.append([layer.before[0].item(), layer.mean[0].item(), layer.mean[1].item(), layer.computed[0].item()])
            assert layer.mean.grad_fn is None
        return seen

    assert assigning(PeriodicAveraging(1), work) == [
        [[0.0, 1.5, 1.5, 1.0], [1.5, 3.5, 3.5, 3.0]],
        [[0.0, 1.5, 1.5, 2.0], [1.5, 3.5, 3.5, 4.0]],
    ]


def test_averaged_model_has_the_mean_of_buffers_assigned_after_a_step():
    def work(run: TrainingRun) -> list[float]:
        see_and_step(run, 1.0)
        layer, seen = run.module[0], []
        layer.see(5.0 + run.topology.rank)  # as when gradients are accumulated
        with run.averaged_model():
            seen += [layer.before[0].item(), layer.mean[0].item()]
        seen += [layer.before[0].item(), layer.mean[0].item()]
        layer.see(7.0 + run.topology.rank)
        run.finish()
        return [*seen, layer.before[0].item(), layer.mean[0].item()]

    assert assigning(PeriodicAveraging(9), work) == [
        [1.5, 5.5, 1.0, 5.0, 5.5, 7.5],
        [1.5, 5.5, 2.0, 6.0, 5.5, 7.5],
    ]


class Product(torch.optim.SGD):
    """An optimizer that multiplies matrices, as Muon does; with an autocast around it the result is narrower."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 1.0) -> None:
        super().__init__(parameters, lr)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                third = torch.full((1, 1), 1 / 3, device=parameter.device)
                parameter.sub_((parameter.grad.view(-1, 1) @ third).view(parameter.shape))


def stepped_in_autocast(scheme: Scheme, wire: Wire | None, with_autocast: bool) -> list[tuple[float, float]]:
    """Return two nodes' values after two steps and a synchronization; the user always multiplies in bfloat16."""

    def body(topology: Topology) -> tuple[float, float]:
        module = nn.Linear(1, 1, bias=False).to(place.device)
        nn.init.ones_(module.weight)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        with begun(TrainingRun(scheme, Replicas(module, [optimizer]), topology, wire)) as run:

            def step() -> None:
                with torch.autocast(place.device.type, torch.bfloat16):
                    loss = module(torch.full((1, 1), 1 / 3 + topology.rank, device=place.device)).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

            def step_in_the_users_autocast() -> None:
                assert torch.is_autocast_enabled(place.device.type) == with_autocast
                step()

            with torch.autocast(place.device.type, torch.bfloat16, enabled=with_autocast):
                for _ in range(2):
                    run.step(optimizer, step_in_the_users_autocast)
                own = module.weight.item()
                run.averaged_model.enter()
                averaged = module.weight.item()
                run.averaged_model.leave()
            return own, averaged

    return on_ranks(body, [[0], [1]])


@pytest.mark.parametrize("wire", [None, "float16"])
@pytest.mark.parametrize(
    "scheme",
    [AllReduce(), DASO(), DiLoCo(1, Product), Gossip(), PeriodicAveraging(1), PeriodicAveraging(4), StepsDelay()],
    ids=lambda scheme: type(scheme).__name__,
)
def test_synchronizations_inside_a_users_autocast_are_those_outside(scheme, wire):
    assert stepped_in_autocast(scheme, Wire.named(wire), True) == stepped_in_autocast(scheme, Wire.named(wire), False)


def test_validation_keeps_parameters_that_two_optimizers_train():
    def body(topology: Topology) -> list[float]:
        module = nn.Linear(1, 1, bias=False).to(place.device)
        nn.init.zeros_(module.weight)
        optimizers = [torch.optim.SGD(module.parameters(), lr=1.0) for _ in range(2)]
        with begun(TrainingRun(PeriodicAveraging(5), Replicas(module, optimizers), topology)) as run:
            add(run, 0, topology.rank + 1.0)
            add(run, 1, topology.rank + 1.0)
            with run.averaged_model():
                seen = [module.weight.item(), run.averaged_model.own_values()[id(module.weight)].item()]
            return [*seen, module.weight.item()]

    assert on_ranks(body, [[0], [1]]) == [[3.0, 2.0, 2.0], [3.0, 4.0, 4.0]]


@pytest.mark.parametrize("scheme", [AllReduce(), DASO(), DiLoCo(1), Gossip(), PeriodicAveraging(1), StepsDelay()])
def test_averaged_model_has_buffers_changed_after_a_sync(scheme):
    def body(topology: Topology) -> list[float]:
        module = nn.BatchNorm1d(1).to(place.device)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        with begun(TrainingRun(scheme, Replicas(module, [optimizer]), topology)) as run:
            add(run, 0, 0.0)
            module.running_mean.fill_(topology.rank)  # another optimizer's forward pass
            assert not run.averaged_model.is_in_module
            with run.averaged_model():
                seen = module.running_mean.item()
            return [seen, module.running_mean.item()]

    assert on_ranks(body, [[0], [1]]) == [[0.5, 0.0], [0.5, 1.0]]


@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(1), PeriodicAveraging(4), Gossip()])
def test_averaged_model_has_buffers_registered_in_training(scheme):
    def body(topology: Topology) -> list[list[float]]:
        module = nn.Linear(1, 1).to(place.device)
        module.register_buffer("late", None)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        with begun(TrainingRun(scheme, Replicas(module, [optimizer]), topology)) as run:
            add(run, 0, 0.0)
            module.late = torch.full((2,), float(topology.rank), device=place.device)
            module.register_buffer("later", torch.full((1,), topology.rank + 1.0, device=place.device))
            module.register_buffer("computed", torch.full((1,), float(topology.rank)), persistent=False)
            assert not run.averaged_model.is_in_module
            with run.averaged_model():
                seen = [*module.late.tolist(), module.later.item(), module.computed.item()]
            own = [*module.late.tolist(), module.later.item()]
            run.finish()
            run.averaged_model.average_module()
            return [seen, own, [*module.late.tolist(), module.later.item()]]

    assert on_ranks(body, [[0], [1]]) == [
        [[0.5, 0.5, 1.5, 0.0], [0.0, 0.0, 1.0], [0.5, 0.5, 1.5]],
        [[0.5, 0.5, 1.5, 1.0], [1.0, 1.0, 2.0], [0.5, 0.5, 1.5]],
    ]


@pytest.mark.parametrize(
    "scheme",
    [AllReduce(), DASO(), DiLoCo(2, fragments=2), Gossip(fragments=2), PeriodicAveraging(2), StepsDelay(2, 0)],
    ids=repr,
)
@pytest.mark.parametrize("at", [0, 1])
def test_a_new_memory_format_in_mid_run_changes_nothing_and_warns(scheme, at):
    def trained(formats: bool) -> list[list[float]]:
        def body(topology: Topology) -> list[float]:
            module = nn.Conv2d(3, 4, 2).to(place.device)
            nn.init.constant_(module.weight, 1.0)
            nn.init.zeros_(module.bias)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            replicas = Replicas(module, [optimizer], bucket_bytes=40)
            with begun(TrainingRun(scheme, replicas, topology)) as run:
                for step in range(4):
                    if formats and step == at:
                        module.to(memory_format=torch.channels_last)
                    with run.averaged_model():
                        pass
                    values = torch.arange(48.0, device=place.device).view_as(module.weight)
                    module.weight.grad = torch.sin(values + step + topology.rank)
                    module.bias.grad = torch.ones_like(module.bias)
                    run.step(optimizer, lambda: optimizer.step())
                run.finish()
            return module.weight.flatten().tolist()

        return on_ranks(body, [[0], [1]])

    expected = trained(formats=False)
    with pytest.warns(UserWarning, match=r"memory_format=\.\.\.\)` changed parameters"):
        assert trained(formats=True) == expected


@pytest.mark.parametrize(
    "scheme",
    [DASO(), DiLoCo(2), DiLoCo(2, torch.optim.Adam), Gossip(), PeriodicAveraging(2), StepsDelay(2, 0)],
    ids=repr,
)
def test_non_contiguous_parameters_train_and_are_saved(scheme):
    def trained(make: Callable[[torch.Tensor], torch.Tensor]) -> list[list[float]]:
        def body(topology: Topology) -> list[float]:
            module = nn.Module()
            values = torch.arange(24.0, device=place.device)
            module.images = nn.Parameter(make(values.reshape(1, 2, 3, 4)))
            module.matrix = nn.Parameter(make(values.reshape(4, 6)))
            module.register_buffer("buffer", make(values.reshape(2, 12)))
            optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.5)
            replicas = Replicas(module, [optimizer], bucket_bytes=40)
            run = TrainingRun(scheme, replicas, topology)
            try:
                run.begin(epochs=4, steps=None)
                run.begin_epoch(0, dict)
                for step in range(4):
                    for each in (module.images, module.matrix):
                        each.grad = make(torch.sin(values + step + topology.rank).reshape(each.shape))
                    run.step(optimizer, lambda: optimizer.step(), last=step == 3)  # which schemes replace
                run.end_epoch()
                with run.averaged_model():
                    run.scheme_states.state()
                    run.averaged_model.own_values()
                run.finish()
                run.scheme_states.load(run.scheme_states.state())
                return [*module.images.flatten().tolist(), *module.matrix.flatten().tolist()]
            finally:
                run.close(timeout=5.0)

        return on_ranks(body, [[0], [1]])

    def otherwise(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values, values], -1).transpose(-2, -3).contiguous().transpose(-2, -3)[..., 0]

    assert otherwise(torch.zeros(2, 3)).stride() == (2, 4)
    ours, expected = trained(otherwise), trained(torch.Tensor.clone)
    assert ours[0] == ours[1]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected))


@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
@pytest.mark.parametrize("scheme", [DiLoCo(1, partial(torch.optim.SGD, lr=1.0)), PeriodicAveraging(1)], ids=repr)
def test_parameter_replaced_in_mid_run_becomes_the_mean(scheme, wire):
    def body(topology: Topology) -> float:
        module = nn.Linear(1, 1, bias=False).to(place.device)
        nn.init.zeros_(module.weight)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        with begun(TrainingRun(scheme, Replicas(module, [optimizer]), topology, Wire.named(wire))) as run:
            add(run, 0, 1.0)
            module.weight = nn.Parameter(torch.full((1, 1), 4.0 * topology.rank, device=place.device))
            optimizer.param_groups[0]["params"] = [module.weight]
            for _ in range(3):
                add(run, 0, 1.0)
            return module.weight.item()

    one, other = on_ranks(body, [[0], [1]])
    assert one == other == pytest.approx(5.0, abs=1e-3)


@pytest.mark.parametrize("scheme", [AllReduce, DASO])
def test_a_loss_that_ranks_of_a_node_hold_together_counts_like_any_other(process_group, scheme):
    """As that of torch's ``loss_parallel()`` is."""
    mesh = init_device_mesh(place.device.type, (1,))

    def work(run: TrainingRun) -> tuple[float, dict[str, float]]:
        loss = torch.tensor(1.0 + 2.0 * run.topology.rank, device=place.device)
        parallel = DTensor.from_local(loss, mesh, run_check=False)
        run.loss.add(parallel)
        common = common_loss(parallel, run.topology, run.gradients_over)
        assert type(common) is torch.Tensor  # process groups take no other
        return common.item(), {name: float(n) for name, n in run.loss.common_state_dict().items()}

    common, watched = zip(*on_two_nodes(scheme, work), strict=True)
    assert common == ((2.0, 2.0) if scheme is AllReduce else (1.0, 3.0))
    assert watched == (({},) if scheme is AllReduce else ({"sum": 2.0, "count": 1.0},)) * 2

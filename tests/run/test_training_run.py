"""What runs the schemes, on threads and without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from harness import on_ranks, place
from runs import TWO_NODES, add, begun, on_two_nodes, scalar, step, with_buffers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_hiercomm.comm.dtensor import DTensor
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.losses import common_loss
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import DASO, AllReduce, DiLoCo, Gossip, PeriodicAveraging, Scheme, StepsDelay

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one


# ---- optimizers ------------------------------------------------------------------------------------------------------


def test_every_optimizer_has_a_scheme_that_counts_its_own_steps():
    def work(run: TrainingRun) -> list[float]:
        for which in (0, 0, 1):
            add(run, which, run.topology.rank + 1.0)
        return [layer.weight.item() for layer in run.module]

    assert on_two_nodes(PeriodicAveraging(2), work) == [[3.0, 1.0], [3.0, 2.0]]


def test_residuals_of_gradients_are_dropped_when_the_first_phase_ends():
    def work(run: TrainingRun) -> list[int]:
        path, (weight,) = run.gradients, run.module.parameters()
        path.reduce(torch.full_like(weight, 0.3).view(-1), 0, [(weight, 0)]).wait()
        kept = [len(path.state_dict()["feedback"])]
        step(run)
        return [*kept, len(path.state_dict()["feedback"])]

    scheme = PeriodicAveraging(8, warmup_steps=1)
    assert on_two_nodes(scheme, work, lambda: nn.Linear(64, 1, bias=False), wire="int4") == [[1, 0], [1, 0]]


def test_replaced_optimizer_is_refused_with_a_remedy():
    def work(run: TrainingRun) -> None:
        fresh = torch.optim.SGD(run.module[0].parameters(), lr=1.0)
        run.step(fresh, fresh.step)

    with pytest.raises(RuntimeError, match="this SGD is none of the optimizers with which the run began"):
        on_two_nodes(PeriodicAveraging(2), work)


@pytest.mark.parametrize(
    ("count", "difference"),
    [(1, "rank 0 has 1 optimizers, rank 1 has 2"), (2, r"optimizer 0 has first.weight .*rank 0, second.weight")],
)
def test_ranks_whose_optimizers_train_other_parameters_are_refused(count, difference):
    def work(topology: Topology) -> None:
        module = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
        layers = list(module.values())[:: 1 if topology.rank == 0 else -1]
        optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in layers]
        if count == 1 and topology.rank == 0:
            del optimizers[1]
        with pytest.raises(ValueError, match=f"ranks train different parameters: {difference}"):
            TrainingRun(PeriodicAveraging(1), Replicas(module, optimizers), topology)

    on_ranks(work, TWO_NODES)


@pytest.mark.parametrize("scheme", [PeriodicAveraging(5), Gossip(fragments=1)], ids=repr)
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
            averaged = run.module[0].weight.item()
        return averaged, any(t is extra for t in own.replica.parameters), own.backgrounds == threads

    assert on_two_nodes(scheme, work) == [(1.5, True, True)] * 2


# ---- the averaged model ----------------------------------------------------------------------------------------------


def test_nested_visits_to_the_averaged_model_end_where_training_was():
    def work(run: TrainingRun) -> list[float]:
        weight = run.module[0].weight
        add(run, 0, run.topology.rank + 1.0)
        run.averaged_model.leave()  # without having entered
        seen = [weight.item()]
        with run.averaged_model():
            seen.append(weight.item())
            run.averaged_model.enter()  # as validation does, between two hooks
            seen.append(weight.item())
            run.averaged_model.leave()
            seen.append(weight.item())
            seen.append(run.averaged_model.own_values()[id(weight)].item())
        return [*seen, weight.item()]

    assert on_two_nodes(PeriodicAveraging(5), work) == [[own, 1.5, 1.5, 1.5, own, own] for own in (1.0, 2.0)]


def test_averaging_between_forward_and_backward_keeps_gradients():
    def module() -> nn.Module:
        made = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        made.register_parameter("teacher", nn.Parameter(torch.ones(1), requires_grad=False))
        return made

    def work(run: TrainingRun) -> list[list[float]]:
        module, rank = run.module, run.topology.rank
        data = rank + torch.arange(4.0, device=place.device)[:, None]
        add(run, 0, 0.1 * rank)
        module.teacher += rank
        found = []
        for looks in (False, True):
            loss = (module.teacher * module(data)).square().mean()
            if looks:
                with run.averaged_model():
                    assert module.teacher.item() == 1.5
            run.optimizers[0].zero_grad()
            loss.backward()
            found.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.requires_grad]).tolist())
        return found

    for without, with_validation in on_two_nodes(PeriodicAveraging(5), work, module):
        assert with_validation == without


def test_end_of_run_averages_float_buffers_and_keeps_counters():
    def work(run: TrainingRun) -> list[object]:
        module, rank = run.module, run.topology.rank
        module.phase.data += 2j * rank
        module.count.data += rank
        add(run, 0, 1.0)
        module.spectrum += 1j * rank
        with run.averaged_model():
            seen = [each.item() for each in (module.phase, module.count, module.spectrum)]
        run.finish()
        run.averaged_model.average_module()
        return [*seen, *(each.item() for each in (module.phase, module.count, module.spectrum))]

    def module() -> nn.Module:
        made = with_buffers(scalar(), spectrum=torch.zeros(1, dtype=torch.complex128))
        made.register_buffer("turned", torch.tensor([1j]).conj())
        made.phase = nn.Parameter(torch.tensor([0j]), requires_grad=False)
        made.count = nn.Parameter(torch.tensor([5]), requires_grad=False)
        return made

    assert on_two_nodes(PeriodicAveraging(1), work, module) == [[1j, count, 0.5j] * 2 for count in (5, 6)]


def test_values_written_into_the_module_are_averaged():
    def work(run: TrainingRun) -> list[float]:
        weight = run.module[1].weight
        weight.data.fill_(run.topology.rank)
        run.averaged_model.average_module()
        run.begin_from_module()
        return [weight.item(), run.schemes[1].state.unsynchronized_steps]

    assert on_two_nodes(PeriodicAveraging(5), work) == [[0.5, 0], [0.5, 0]]


def test_parameter_writes_on_any_rank_are_noticed_on_all():
    def work(run: TrainingRun) -> list[bool]:
        noticed = [run.values_have_changed()]
        if run.topology.rank == 1:
            run.module[1].weight.data.fill_(0.5)
        noticed.append(run.values_have_changed())
        run.remember_values()
        return [*noticed, run.values_have_changed()]

    assert on_two_nodes(PeriodicAveraging(5), work) == [[False, True, False]] * 2


def test_validation_keeps_parameters_that_two_optimizers_train():
    def body(topology: Topology) -> list[float]:
        module = scalar().to(place.device)
        optimizers = [torch.optim.SGD(module.parameters(), lr=1.0) for _ in range(2)]
        with begun(TrainingRun(PeriodicAveraging(5), Replicas(module, optimizers), topology)) as run:
            add(run, 0, topology.rank + 1.0)
            add(run, 1, topology.rank + 1.0)
            with run.averaged_model():
                seen = [module.weight.item(), run.averaged_model.own_values()[id(module.weight)].item()]
            return [*seen, module.weight.item()]

    assert on_ranks(body, TWO_NODES) == [[3.0, 2.0, 2.0], [3.0, 4.0, 4.0]]


# ---- kinds of parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [StepsDelay(2, 2), PeriodicAveraging(2)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_train_as_their_real_and_imaginary_parts_do(scheme, dtype):
    def trained(is_complex: bool) -> list[torch.Tensor]:
        def module() -> nn.Module:
            made, values = nn.Module(), torch.zeros(3, dtype=dtype)
            made.weight = nn.Parameter(values if is_complex else torch.view_as_real(values))
            return made

        def work(run: TrainingRun) -> torch.Tensor:
            own, optimizer = run.module.weight, run.optimizers[0]
            for n in range(6):
                weight = own if is_complex else torch.view_as_complex(own)
                target = torch.tensor([1 + n, 1j * run.topology.rank, 2 - 3j], dtype=dtype, device=place.device)
                (weight - target).abs().square().sum().backward()
                run.step(optimizer, lambda: optimizer.step())
                optimizer.zero_grad()
            run.finish()
            return torch.view_as_real(own.detach()) if is_complex else own.detach()

        return on_two_nodes(scheme, work, module, inner=partial(torch.optim.SGD, lr=0.1))

    for is_complex, is_real in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(is_complex, is_real)


@pytest.mark.parametrize(
    "scheme",
    [AllReduce(), DASO(), DiLoCo(2, fragments=2), Gossip(fragments=2), PeriodicAveraging(2), StepsDelay(2, 0)],
    ids=repr,
)
@pytest.mark.parametrize("at", [0, 1])
def test_a_new_memory_format_in_mid_run_changes_nothing_and_warns(scheme, at):
    def module() -> nn.Module:
        made = nn.Conv2d(3, 4, 2)
        nn.init.constant_(made.weight, 1.0)
        nn.init.zeros_(made.bias)
        return made

    def work(run: TrainingRun, formats: bool) -> list[float]:
        for n in range(4):
            if formats and n == at:
                run.module.to(memory_format=torch.channels_last)
            with run.averaged_model():
                pass
            step(run, lambda p, n=n: torch.sin(numbers(p) + n + run.topology.rank))
        run.finish()
        return run.module.weight.flatten().tolist()

    chosen = {"inner": partial(torch.optim.SGD, lr=0.1), "bucket_bytes": 40}
    expected = on_two_nodes(scheme, partial(work, formats=False), module, **chosen)
    with pytest.warns(UserWarning, match=r"memory_format=\.\.\.\)` changed parameters"):
        assert on_two_nodes(scheme, partial(work, formats=True), module, **chosen) == expected


def numbers(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(float(like.numel()), device=place.device).view(like.shape)


@pytest.mark.parametrize(
    "scheme",
    [DASO(), DiLoCo(2), DiLoCo(2, torch.optim.Adam), Gossip(), PeriodicAveraging(2), StepsDelay(2, 0)],
    ids=repr,
)
def test_non_contiguous_parameters_train_and_are_saved(scheme):
    def work(run: TrainingRun, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        (optimizer,) = run.optimizers
        for n in range(4):
            for each in (run.module.images, run.module.matrix):
                each.grad = make(torch.sin(numbers(each) + n + run.topology.rank))
            run.step(optimizer, lambda: optimizer.step(), last=n == 3)  # which schemes replace
        run.end_epoch()
        with run.averaged_model():
            run.scheme_states.state()
            run.averaged_model.own_values()
        run.finish()
        run.scheme_states.load(run.scheme_states.state())
        return torch.cat([run.module.images.detach().flatten(), run.module.matrix.detach().flatten()])

    def trained(make: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        def module() -> nn.Module:
            made, values = nn.Module(), torch.arange(24.0, device=place.device)
            made.images = nn.Parameter(make(values.reshape(1, 2, 3, 4)))
            made.matrix = nn.Parameter(make(values.reshape(4, 6)))
            made.register_buffer("buffer", make(values.reshape(2, 12)))
            return made

        inner = partial(torch.optim.SGD, lr=1.0, momentum=0.5)
        return on_two_nodes(scheme, partial(work, make=make), module, inner=inner, epochs=4, bucket_bytes=40)

    def otherwise(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values, values], -1).transpose(-2, -3).contiguous().transpose(-2, -3)[..., 0]

    assert otherwise(torch.zeros(2, 3)).stride() == (2, 4)
    ours, expected = trained(otherwise), trained(torch.Tensor.clone)
    assert torch.equal(*ours)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
@pytest.mark.parametrize("scheme", [DiLoCo(1, partial(torch.optim.SGD, lr=1.0)), PeriodicAveraging(1)], ids=repr)
def test_parameter_replaced_in_mid_run_becomes_the_mean(scheme, wire):
    def work(run: TrainingRun) -> float:
        add(run, 0, 1.0)
        run.module.weight = nn.Parameter(torch.full((1, 1), 4.0 * run.topology.rank, device=place.device))
        run.optimizers[0].param_groups[0]["params"] = [run.module.weight]
        for _ in range(3):
            add(run, 0, 1.0)
        return run.module.weight.item()

    one, other = on_two_nodes(scheme, work, scalar, wire=wire)
    assert one == other == pytest.approx(5.0, abs=1e-3)


# ---- autocast, losses ------------------------------------------------------------------------------------------------


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


def stepped_in_autocast(scheme: Scheme, wire: str | None, with_autocast: bool) -> list[tuple[float, float]]:
    """Return two nodes' values after two steps and a synchronization; the user always multiplies in bfloat16."""

    def work(run: TrainingRun) -> tuple[float, float]:
        module, (optimizer,) = run.module, run.optimizers

        def step() -> None:
            assert torch.is_autocast_enabled(place.device.type) == with_autocast
            with torch.autocast(place.device.type, torch.bfloat16):
                loss = module(torch.full((1, 1), 1 / 3 + run.topology.rank, device=place.device)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        with torch.autocast(place.device.type, torch.bfloat16, enabled=with_autocast):
            for _ in range(2):
                run.step(optimizer, step)
            own = module.weight.item()
            with run.averaged_model():
                return own, module.weight.item()

    return on_two_nodes(scheme, work, scalar, wire=wire)


@pytest.mark.parametrize("wire", [None, "float16"])
@pytest.mark.parametrize(
    "scheme",
    [AllReduce(), DASO(), DiLoCo(1, Product), Gossip(), PeriodicAveraging(1), PeriodicAveraging(4), StepsDelay()],
    ids=lambda scheme: type(scheme).__name__,
)
def test_synchronizations_inside_a_users_autocast_are_those_outside(scheme, wire):
    assert stepped_in_autocast(scheme, wire, True) == stepped_in_autocast(scheme, wire, False)


@pytest.mark.parametrize("scheme", [AllReduce(), DASO()], ids=repr)
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
    is_common = scheme == AllReduce()
    assert common == ((2.0, 2.0) if is_common else (1.0, 3.0))
    assert watched == (({},) if is_common else ({"sum": 2.0, "count": 1.0},)) * 2

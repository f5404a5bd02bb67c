"""Float buffers in a training run: averaged wherever the model is seen, and at synchronizations."""

from __future__ import annotations

import math

import pytest
import torch
from harness import on_ranks, place
from runs import TWO_NODES, add, begun, on_two_nodes, scalar, step, with_buffers
from torch import nn

from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import DASO, AllReduce, DiLoCo, Gossip, PeriodicAveraging, Scheme, StepsDelay
from lightning_hiercomm.schemes.nonfinite import NonfiniteError

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one


def test_buffer_is_averaged_again_once_it_is_finite_everywhere():
    buffers = {"best": torch.tensor(math.inf), "mask": torch.full((2,), -math.inf)}

    def work(run: TrainingRun) -> list[float]:
        rank, best, seen = run.topology.rank, run.module.best, []
        for own in (3.0 if rank == 0 else math.inf, rank + 1.0):
            best.fill_(own)
            add(run, 0, 1.0)  # which synchronizes, so nothing but the buffer differs
            with run.averaged_model():
                seen.append(best.item())
            seen.append(best.item())
        run.finish()
        run.averaged_model.average_module()
        assert run.module.mask.isneginf().all()
        return [*seen, best.item()]

    found = on_two_nodes(PeriodicAveraging(1), work, lambda: with_buffers(scalar(), **buffers))
    assert found == [[3.0, 3.0, 1.5, 1.0, 1.5], [math.inf, math.inf, 1.5, 2.0, 1.5]]


def test_whether_a_buffer_has_a_mean_is_decided_when_training_begins():
    def body(topology: Topology) -> float:
        nan = torch.tensor(math.nan)
        module = with_buffers(scalar(), filled=nan, partly=nan, mask=torch.zeros(2)).to(place.device)
        replicas = Replicas(module, [torch.optim.SGD(module.parameters(), lr=1.0)])
        run = TrainingRun(PeriodicAveraging(1), replicas, topology)
        module.filled.fill_(1.0 + topology.rank)
        module.mask.fill_(-math.inf)
        if topology.rank == 0:
            module.partly.fill_(1.0)
        with begun(run):
            add(run, 0, 1.0)
            assert module.mask.isneginf().all()
            assert replicas.without_mean == {"partly", "mask"}
            return module.filled.item()

    assert on_ranks(body, TWO_NODES) == [1.5, 1.5]


LOWEST = torch.finfo(torch.float32).min
MASKS = {
    "infinite": torch.full((6, 6), -math.inf).triu(1),
    "lowest": torch.full((6, 6), LOWEST).triu(1),
    "half": torch.full((6, 6), 0.49 * LOWEST).triu(1),  # whose sum overflows
    "lowest of bfloat16": torch.full((6, 6), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16).triu(1),
    "float64": torch.full((6, 6), -1e308, dtype=torch.float64).triu(1),
}


def sent_with(mask: torch.Tensor | None, scheme: Scheme, wire: str | None) -> list[dict[str, float]]:
    """Bytes of four steps on two nodes, with a buffer and a look at the averaged model."""

    def work(run: TrainingRun) -> dict[str, float]:
        for _ in range(4):
            run.module.running_mean += run.topology.rank
            add(run, 0, -0.25 * (run.topology.rank + 1))
        with run.averaged_model():
            assert mask is None or torch.equal(run.module.mask.cpu(), mask)
        run.finish()
        assert mask is None or torch.equal(run.module.mask.cpu(), mask)
        return run.topology.meter.snapshot()

    return on_two_nodes(scheme, work, lambda: with_buffers(nn.BatchNorm1d(50), mask=mask), wire=wire)


@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
@pytest.mark.parametrize("scheme", [PeriodicAveraging(2), DiLoCo(2), Gossip(fragments=2)], ids=repr)
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_travels_on_no_wire_and_makes_nothing_travel_twice(mask, scheme, wire):
    for own, with_mask in zip(*(sent_with(each, scheme, wire) for each in (None, MASKS[mask])), strict=True):
        assert with_mask["inter_bytes"] == own["inter_bytes"]
        assert 0 <= with_mask["world_bytes"] - own["world_bytes"] <= 64  # one number of it is compared at a look


def test_buffers_are_averaged_by_the_optimizer_that_trains_their_layer():
    module = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(3), nn.BatchNorm1d(4, affine=False)])
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in module[:2]]
    replicas = Replicas(module, optimizers)
    # the layer without parameters goes to the first; counts of batches are integers
    assert [b.numel() for b in replicas.of(optimizers[0]).buffers] == [2, 2, 4, 4]
    assert [b.numel() for b in replicas.of(optimizers[1]).buffers] == [3, 3]
    assert not Replicas(module, optimizers, average_buffers=False).of(optimizers[0]).buffers
    named = Replicas(module, optimizers, average_buffers=["[02].running_mean", "*var"])
    named.check_names()
    first, second, last = ([layer.running_mean, layer.running_var] for layer in module)
    assert named.of(optimizers[0]).buffers == [*first, *last]
    assert named.of(optimizers[1]).buffers == second[1:]
    assert len(named.whole().buffers) == len([*module.parameters()]) + 5


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


def two_assigning() -> nn.ModuleList:
    return nn.ModuleList([Assigning(), Assigning()])


def see_and_step(run: TrainingRun, value: float) -> None:
    for which, layer in enumerate(run.module):
        layer.see(value + run.topology.rank)
        step(run, which=which)


def test_reassigned_buffers_synchronize_unless_non_persistent():
    def work(run: TrainingRun) -> list[list[float]]:
        seen = []
        for value in (1.0, 3.0):
            see_and_step(run, value)
            layer = run.module[1]
            seen.append([layer.before[0].item(), *layer.mean.tolist(), layer.computed[0].item()])
            assert layer.mean.grad_fn is None
        return seen

    assert on_two_nodes(PeriodicAveraging(1), work, two_assigning, bucket_bytes=12) == [
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

    assert on_two_nodes(PeriodicAveraging(9), work, two_assigning, bucket_bytes=12) == [
        [1.5, 5.5, 1.0, 5.0, 5.5, 7.5],
        [1.5, 5.5, 2.0, 6.0, 5.5, 7.5],
    ]


@pytest.mark.parametrize(
    "scheme", [AllReduce(), DASO(), DiLoCo(1), Gossip(), PeriodicAveraging(1), StepsDelay()], ids=repr
)
def test_averaged_model_has_buffers_changed_after_a_sync(scheme):
    def work(run: TrainingRun) -> list[float]:
        add(run, 0, 0.0)
        run.module.running_mean.fill_(run.topology.rank)  # another optimizer's forward pass
        assert not run.averaged_model.is_in_module
        with run.averaged_model():
            seen = run.module.running_mean.item()
        return [seen, run.module.running_mean.item()]

    assert on_two_nodes(scheme, work, lambda: nn.BatchNorm1d(1)) == [[0.5, 0.0], [0.5, 1.0]]


@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(1), PeriodicAveraging(4), Gossip()], ids=repr)
def test_averaged_model_has_buffers_registered_in_training(scheme):
    def work(run: TrainingRun) -> list[list[float]]:
        module, rank = run.module, run.topology.rank
        add(run, 0, 0.0)
        module.late = torch.full((2,), float(rank), device=place.device)
        module.register_buffer("later", torch.full((1,), rank + 1.0, device=place.device))
        module.register_buffer("computed", torch.full((1,), float(rank)), persistent=False)
        assert not run.averaged_model.is_in_module
        with run.averaged_model():
            seen = [*module.late.tolist(), module.later.item(), module.computed.item()]
        own = [*module.late.tolist(), module.later.item()]
        run.finish()
        run.averaged_model.average_module()
        return [seen, own, [*module.late.tolist(), module.later.item()]]

    assert on_two_nodes(scheme, work, lambda: with_buffers(scalar(), late=None)) == [
        [[0.5, 0.5, 1.5, 0.0], [0.0, 0.0, 1.0], [0.5, 0.5, 1.5]],
        [[0.5, 0.5, 1.5, 1.0], [1.0, 1.0, 2.0], [0.5, 0.5, 1.5]],
    ]


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_buffers_stay_synchronized_after_an_unfreeze(wire):
    def work(run: TrainingRun) -> list[list[float]]:
        seen = []
        for at in range(8):
            run.module.bias.requires_grad_(at >= 4)
            run.module.moved += run.topology.rank + 1  # as a forward pass does, on each rank another way
            step(run)
            seen.append(run.module.moved.tolist())
        return seen

    def module() -> nn.Module:
        return with_buffers(nn.Linear(1, 1), moved=torch.zeros(3))

    one, other = on_two_nodes(PeriodicAveraging(1), work, module, wire=wire)
    assert one == other == [[1.5 * (at + 1)] * 3 for at in range(8)]


@pytest.mark.parametrize("scheme", [PeriodicAveraging(2), AllReduce()], ids=repr)
def test_a_node_whose_buffer_is_not_finite_is_named(scheme):
    def work(run: TrainingRun) -> None:
        for _ in range(2):
            run.module.moving[0] = math.nan if run.topology.rank == 1 else 0.0
            step(run)
        run.finish()
        run.averaged_model.average_module()

    with pytest.raises(NonfiniteError, match=r"rank 1 \(node 1\): buffer moving \(1 of 3 elements\)"):
        on_two_nodes(scheme, work, lambda: with_buffers(scalar(), moving=torch.zeros(3)))


@pytest.mark.parametrize("scheme", [PeriodicAveraging(1), DiLoCo(1)], ids=repr)
def test_an_averaged_buffer_that_changes_its_shape_in_training_is_refused(scheme):
    def work(run: TrainingRun) -> str:
        run.module.bank = torch.zeros(3, device=place.device)
        with pytest.raises(ValueError, match="buffer bank is averaged over ranks, but changed") as refused:
            step(run)
        return str(refused.value)

    for text in on_two_nodes(scheme, work, lambda: with_buffers(nn.BatchNorm1d(1), bank=torch.zeros(2))):
        assert "from [2], torch.float32 to [3], torch.float32. Leave it out" in text


def test_buffers_that_ddp_ignores_cannot_be_named_for_averaging():
    module = nn.BatchNorm1d(2)
    module._ddp_params_and_buffers_to_ignore = ["running_mean"]
    with pytest.raises(ValueError, match="They are running_var, without those that DDP ignores"):
        Replicas(module, [], average_buffers=["running_mean"]).check_names()
    Replicas(module, [], average_buffers=["running_*"]).check_names()


@pytest.mark.parametrize("scheme", [PeriodicAveraging(2), DiLoCo(2), Gossip(fragments=2)], ids=repr)
def test_unit_vectors_of_spectral_norm_are_not_averaged(scheme):
    """Those of nodes may be opposite: the mean of them is zero, and the weights are divided by what is along it."""

    def module() -> nn.Module:
        made = nn.utils.spectral_norm(nn.Linear(3, 2))
        for tensor in (made.weight_orig, made.bias, made.weight_u, made.weight_v):
            tensor.data.fill_(0.5)
        return made

    def work(run: TrainingRun) -> list[torch.Tensor]:
        own, seen = run.module, []
        own.weight_u.mul_(1 - 2 * run.topology.rank)
        for _ in range(3):
            own(torch.ones(1, 3, device=place.device))  # normalizes the vectors, and keeps their signs
            step(run, torch.ones_like)
        with run.averaged_model():
            seen += [own.weight_u.clone(), own.weight_v.clone()]
        run.finish()
        run.averaged_model.average_module()
        return [*seen, own.weight_u, own.weight_v]

    for vectors in zip(*on_two_nodes(scheme, work, module), strict=True):
        assert torch.equal(*vectors)
        assert vectors[0].norm() == pytest.approx(1.0)

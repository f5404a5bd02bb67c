"""Gradients of two nodes of one rank, averaged on threads; those of shards are in tests/model_parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import needs_a_backward_pass_for_each_rank, on_ranks, place
from torch import Tensor, nn

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.sharded_gradients import ShardedGradients
from lightning_hiercomm.schemes.gradient_path import InterNodeMean

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one


class Recording(InterNodeMean):
    def __init__(self, topology: Topology, said: list[str]) -> None:
        super().__init__(topology, Wire())
        self.said = said

    def reduce(self, bucket: Tensor, index: int = 0, *args: Any, **keywords: Any) -> Any:
        self.said.append(f"bucket {index}")
        return super().reduce(bucket, index, *args, **keywords)


def on_two_nodes(work: Callable[[nn.Sequential, ShardedGradients, list[str]], Any]) -> list[Any]:
    """``work(layers, gradients, said)`` on two nodes of one rank: three layers of one weight, each a bucket."""

    needs_a_backward_pass_for_each_rank()

    def body(topology: Topology) -> Any:
        layers = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3))).to(place.device)
        said: list[str] = []
        for index, layer in enumerate(layers):
            nn.init.ones_(layer.weight)
            layer.weight.register_hook(lambda _, index=index: said.append(f"layer {index}"))
        gradients = ShardedGradients(layers.parameters(), Recording(topology, said), topology, {}, bucket_bytes=4)
        try:
            return work(layers, gradients, said)
        finally:
            gradients.close()

    return on_ranks(body, [[0], [1]])


def backward(layers: nn.Module, gradients: ShardedGradients, x: float) -> list[float | None]:
    layers.zero_grad()
    with gradients.backward():
        layers(torch.tensor([[x]], device=place.device)).sum().backward()
    return [None if p.grad is None else p.grad.item() for p in layers.parameters()]


def backward_several(times: int, layers: nn.Module, gradients: ShardedGradients) -> None:
    with gradients.backward():
        for _ in range(times):
            layers(torch.tensor([[2.0]], device=place.device)).sum().backward()


def test_sharded_gradients_are_reduced_outside_of_autocast():
    def work(layers, gradients, said):
        def reduce(bucket: Tensor, *args: Any, **keywords: Any) -> Any:
            said.append(f"autocast {torch.is_autocast_enabled(place.device.type)}")
            return Recording.reduce(path, bucket, *args, **keywords)

        path = gradients.path
        path.reduce = reduce
        with torch.autocast(place.device.type, torch.bfloat16):
            for _ in range(2):
                backward(layers, gradients, 1.0)
            assert torch.is_autocast_enabled(place.device.type)
        return [each for each in said if each.startswith("autocast")]

    assert on_two_nodes(work) == [["autocast False"] * 6] * 2


def own(gradients: ShardedGradients) -> float:
    return 1.0 + 2.0 * gradients.topology.rank


def test_every_pass_gives_the_mean_and_later_passes_overlap():
    def work(layers, gradients, said):
        results = [backward(layers, gradients, own(gradients)) for _ in range(2)]
        return results, said

    backwards = ["layer 2", "layer 1", "layer 0"]
    first = [*backwards, "bucket 0", "bucket 1", "bucket 2"]
    second = ["layer 2", "bucket 0", "layer 1", "bucket 1", "layer 0", "bucket 2"]
    for results, said in on_two_nodes(work):
        assert results == [[2.0] * 3] * 2
        assert said == first + second


def test_gradient_missing_on_one_node_counts_as_zero():
    def work(layers, gradients, said):
        used = nn.Sequential(layers[0], *([layers[2]] if gradients.topology.rank == 0 else []))
        for _ in range(2):
            layers.zero_grad()
            result = backward(used, gradients, 4.0)
        return result, layers[1].weight.grad, layers[2].weight.grad.item()

    for result, unused, partly_used in on_two_nodes(work):
        assert result[0] == 4.0
        assert unused is None
        assert partly_used == 2.0


def test_zero_gradient_reaches_a_node_without_one():
    def work(layers, gradients, said):
        used = layers if gradients.topology.rank == 0 else layers[2:]
        for _ in range(2):  # from the second on, buckets leave during the pass
            result = backward(used, gradients, 0.0)
        return result, layers[0].weight.grad

    for _, rarely_used in on_two_nodes(work):
        assert rarely_used == torch.zeros(1, 1)


def test_gradients_cross_nodes_only_in_inter_node_groups():
    def work(layers, gradients, said):
        backward(layers, gradients, 1.0)  # which asks everybody, once, whether buckets may leave early
        messages = gradients.topology.meter.messages
        before = messages.copy()
        backward(layers, gradients, 1.0)
        return {level: messages[level] - before[level] for level in ("inter", "world")}

    # a ring of all ranks takes two rounds for every rank but one, an inter-node group one or two
    assert on_two_nodes(work) == [{"inter": 4, "world": 0}] * 2


def test_buckets_wait_for_a_pass_that_writes_gradients_repeatedly():
    def work(layers, gradients, said):
        for _ in range(2):
            layers.zero_grad()
            backward_several(1 + gradients.topology.rank, layers, gradients)  # only one node does
        return [p.grad.item() for p in layers.parameters()], said[-3:]

    for result, last in on_two_nodes(work):
        assert result == [3.0] * 3
        assert last == ["bucket 0", "bucket 1", "bucket 2"]


def test_a_gradient_that_is_written_again_when_it_has_left_is_an_error():
    def work(layers, gradients, said):
        backward(layers, gradients, 1.0)
        with pytest.raises(RuntimeError, match=r"shape \(1, 1\) was written again .* PeriodicAveraging\(1\)"):
            backward_several(2, layers, gradients)

    on_two_nodes(work)


def test_accumulated_gradients_are_averaged_with_the_last_pass():
    def work(layers, gradients, said):
        for _ in range(2):
            layers.zero_grad()
            layers(torch.tensor([[1.0]], device=place.device)).sum().backward()
            with gradients.backward():
                layers(torch.tensor([[own(gradients)]], device=place.device)).sum().backward()
        return [p.grad.item() for p in layers.parameters()]

    assert on_two_nodes(work) == [[3.0] * 3] * 2


@pytest.mark.parametrize("of_layers", ["backward", "shards"])
def test_gradients_of_another_stream_reach_the_mean(fake_device, of_layers):
    """The buckets wait for them, and stay allocated: all layers are of one other stream, or some are, as with FSDP2."""
    if place.device.type != "cpu":
        pytest.skip("the streams are played on the CPU")

    def work(layers, gradients, said):
        of_training, other = fake_device.current(), streams.new(place.device)
        for _ in range(2):  # from the second on, buckets leave during the pass
            layers.zero_grad()
            x = torch.tensor([[own(gradients)]], device=place.device)
            other.wait_stream(of_training)
            passes = [(layers, other)]
            if of_layers == "shards":
                passes = list(zip(layers, (other, other, of_training), strict=True))
            with gradients.backward():
                for layer, stream in passes:
                    with fake_device.within(stream):
                        layer(x).sum().backward()
                of_training.wait_stream(other)  # as autograd has it, and its allocator knows of both
                for parameter in layers.parameters():
                    fake_device.keep(of_training, parameter.grad)
        return [p.grad.item() for p in layers.parameters()]

    assert on_two_nodes(work) == [[2.0] * 3] * 2

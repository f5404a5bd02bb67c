"""Buffers that layers reassign are found where they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_hiercomm.nodes.buffers import Buffers, homes_of_buffers, is_persistent, names_of_directions
from lightning_hiercomm.nodes.replica import Replica


def test_unit_vectors_of_both_of_torchs_spectral_norms_are_known():
    new, old = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), nn.utils.spectral_norm(nn.Linear(2, 2))
    module = nn.Sequential(new, old, nn.BatchNorm1d(2), torch.jit.script(nn.BatchNorm1d(2)))
    vectors = {"0.parametrizations.weight.0._u", "0.parametrizations.weight.0._v", "1.weight_u", "1.weight_v"}
    assert names_of_directions(module) == vectors
    assert vectors < dict(module.named_buffers()).keys()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.full((3,), 1.0))
        self.register_buffer("two", torch.full((3,), 2.0))
        self.register_buffer("computed", torch.zeros(3), persistent=False)


def found(layer: nn.Module) -> Buffers:
    return Buffers([layer.one, layer.two], homes_of_buffers(layer))


def test_torch_still_stores_which_buffers_are_persistent():
    layer = Layer()
    assert {name for name, _ in layer.named_buffers() if is_persistent(layer, name)} == set(layer.state_dict())
    scripted = torch.jit.script(nn.BatchNorm1d(2))
    assert all(is_persistent(scripted, name) for name, _ in scripted.named_buffers())


def test_layers_get_a_copy_so_that_who_writes_to_it_writes_to_nothing_else():
    layer, weight = Layer(), torch.ones(3, requires_grad=True)
    buffers = found(layer)
    doubled = 2.0 * weight
    layer.one, layer.two = doubled, weight.data
    assert buffers.find()
    for tensor in buffers.tensors:
        tensor.fill_(7.0)
    assert [layer.one.tolist(), layer.two.tolist()] == [[7.0] * 3] * 2
    assert doubled.tolist() == [2.0] * 3
    assert weight.tolist() == [1.0] * 3
    assert not layer.one.requires_grad
    with torch.inference_mode():
        layer.one = torch.zeros(3)
    assert buffers.find()
    buffers.tensors[0].fill_(1.0)
    assert not buffers.find()


def test_layers_may_swap_buffers_or_give_one_two_names():
    layer = Layer()
    buffers = found(layer)
    one, two = layer.one, layer.two
    layer.one, layer.two = two, one
    assert buffers.find()
    assert buffers.tensors[0] is layer.one is two
    assert buffers.tensors[1] is layer.two is one
    layer.one = layer.two
    assert buffers.find()
    assert buffers.tensors[0] is buffers.tensors[1] is layer.one is layer.two
    layer.one = torch.full((3,), 5.0)
    assert buffers.find()
    assert [each.tolist() for each in buffers.tensors] == [[5.0] * 3, [1.0] * 3]
    layer.one = layer.two = torch.full((3,), 6.0)
    assert buffers.find()
    assert layer.one is layer.two


@pytest.mark.parametrize(
    "other", [torch.zeros(4), torch.zeros(3, dtype=torch.float64), None, torch.zeros(3).to_sparse()], ids=str
)
def test_a_buffer_of_another_shape_or_type_is_refused(other):
    layer = Layer()
    buffers = Buffers([layer.one, layer.two], homes_of_buffers(nn.Sequential(layer)))
    layer.one = other
    with pytest.raises(ValueError, match=r"buffer 0\.one is averaged .* from \[3\], torch.float32 to"):
        buffers.find()


@pytest.mark.parametrize("size", [1, 7])
def test_a_buffer_that_is_resized_in_place_is_refused(size):
    """As observers of quantized layers do."""
    layer = Layer()
    buffers = found(layer)
    layer.one.resize_(size)
    with pytest.raises(ValueError, match=rf"from \[3\], torch.float32 to \[{size}\]"):
        buffers.find()


def test_a_replicas_buckets_stay_and_hold_the_buffers_of_now():
    layer = Layer()
    homes, named = homes_of_buffers(layer), layer.named_buffers()
    replica = Replica([], [layer.one, layer.two], bucket_bytes=16, named=named, homes=homes)
    buckets = replica.buckets_of_buffers
    before = replica.snapshot()
    layer.one = torch.arange(3.0)[::2].repeat(2)[:3]
    layer.two = torch.full((3,), 4.0).view(3, 1).expand(3, 2)[:, 1]
    replica.find_buffers()
    assert replica.buckets_of_buffers == buckets
    assert [bucket.pack().tolist() for bucket in buckets] == [[0.0, 2.0, 0.0, 4.0], [4.0, 4.0]]
    assert [replica.names[id(tensor)] for tensor in replica.tensors] == ["one", "two"]
    replica.restore(before)
    assert [layer.one.tolist(), layer.two.tolist()] == [[1.0] * 3, [2.0] * 3]

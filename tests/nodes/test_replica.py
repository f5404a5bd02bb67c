"""Replicas as buckets: whatever the shapes, dtypes, memory layouts and bucket size, nothing is lost or doubled."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from harness import place
from hypothesis import given
from hypothesis import strategies as st

from lightning_hiercomm.nodes.bucket import ShardSpec
from lightning_hiercomm.nodes.replica import Replica

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
layouts = st.sampled_from(["contiguous", "transposed", "strided", "channels_last", "offset"])
kinds = st.tuples(shapes, st.sampled_from(DTYPES), layouts)
bucket_sizes = st.one_of(st.integers(1, 64), st.just(4 * 2**20))


def make(kind) -> torch.Tensor:
    """An empty tensor of a shape, dtype and memory layout, where the ranks compute."""
    shape, dtype, layout = kind
    empty = partial(torch.empty, dtype=dtype, device=place.device)
    if layout == "transposed":
        return empty(shape[::-1]).permute(tuple(reversed(range(len(shape)))))
    if layout == "strided" and shape:
        return empty((*shape[:-1], 2 * shape[-1]))[..., ::2]
    if layout == "offset":
        numel = torch.Size(shape).numel()
        return empty(numel + 3)[3:].view(shape)
    tensor = empty(shape)
    return tensor.to(memory_format=torch.channels_last) if layout == "channels_last" and len(shape) == 4 else tensor


def filled(kinds, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        tensor.copy_(torch.randn(tensor.shape, dtype=torch.float64, generator=generator)) for tensor in map(make, kinds)
    ]


@given(st.lists(kinds, max_size=8), st.lists(kinds, max_size=3), bucket_sizes)
def test_every_element_is_in_exactly_one_bucket(parameters, buffers, bucket_bytes):
    parameters, buffers = filled(parameters, 0), filled(buffers, 1)
    replica = Replica(parameters, buffers, bucket_bytes)
    covered = Counter(
        (id(piece.tensor), i)
        for bucket in replica.buckets
        for piece in bucket.slices
        for i in range(piece.start, piece.start + piece.length)
    )
    elements = {(id(tensor), i) for tensor in (*parameters, *buffers) for i in range(tensor.numel())}
    assert covered == Counter(elements)
    assert replica.numel == len(elements)
    assert replica.nbytes == sum(tensor.numel() * tensor.element_size() for tensor in (*parameters, *buffers))


@given(st.lists(kinds, max_size=8), st.lists(kinds, max_size=3), bucket_sizes)
def test_a_bucket_holds_one_dtype_one_kind_and_no_more_than_fits(parameters, buffers, bucket_bytes):
    parameters, buffers = filled(parameters, 0), filled(buffers, 1)
    for bucket in Replica(parameters, buffers, bucket_bytes).buckets:
        own = {id(tensor) for tensor in (buffers if bucket.keeps_equal else parameters)}
        assert all(piece.tensor.dtype == bucket.dtype and id(piece.tensor) in own for piece in bucket.slices)
        assert bucket.numel == sum(piece.length for piece in bucket.slices)
        capacity = max(1, bucket_bytes // bucket.dtype.itemsize)
        # only a tensor that cannot be cut makes a bucket larger
        assert bucket.numel <= capacity or not bucket.slices[-1].tensor.is_contiguous()
        assert sum(piece.length for piece in bucket.slices[:-1]) < capacity


@given(st.lists(kinds, max_size=8), bucket_sizes, st.integers(1, 5))
def test_packing_and_unpacking_gives_every_tensor_back(kinds, bucket_bytes, multiple_of):
    tensors = filled(kinds, 0)
    before = [tensor.clone() for tensor in tensors]
    replica = Replica(tensors, bucket_bytes=bucket_bytes)
    flats = [bucket.pack(multiple_of=multiple_of) for bucket in replica.buckets]
    for bucket, flat in zip(replica.buckets, flats, strict=True):
        assert flat.numel() % multiple_of == 0
        assert flat.numel() - bucket.numel < multiple_of
        assert not flat[bucket.numel :].any()
    for tensor in tensors:
        tensor.fill_(7)
    for bucket, flat in zip(replica.buckets, flats, strict=True):
        bucket.unpack(flat)
    for tensor, expected in zip(tensors, before, strict=True):
        assert torch.equal(tensor, expected)


@given(st.lists(kinds, min_size=1, max_size=5), bucket_sizes)
def test_a_snapshot_is_a_copy_that_restores(kinds, bucket_bytes):
    tensors = filled(kinds, 0)
    replica = Replica(tensors, bucket_bytes=bucket_bytes)
    before, snapshot = [tensor.clone() for tensor in tensors], replica.snapshot()
    for tensor in tensors:
        tensor.zero_()
    replica.restore(snapshot)
    assert all(torch.equal(tensor, expected) for tensor, expected in zip(tensors, before, strict=True))


def test_tied_tensors_count_once_and_unpacking_keeps_parameters_trainable():
    weight = torch.nn.Parameter(torch.arange(6.0, device=place.device).view(2, 3))
    replica = Replica([weight, weight, torch.nn.Parameter(torch.zeros(0, device=place.device))])
    assert replica.numel == 6
    (bucket,) = replica.buckets
    bucket.unpack(bucket.pack().mul_(2))
    assert weight.requires_grad
    assert weight.grad_fn is None
    assert weight.tolist() == [[0, 2, 4], [6, 8, 10]]


def test_an_empty_replica_has_no_buckets():
    replica = Replica([])
    assert replica.buckets == []
    assert replica.numel == replica.nbytes == 0
    assert replica.device == torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_survive_packing_even_of_nan_and_negative_zero(dtype):
    tensor = torch.tensor([float("nan"), -0.0, float("inf"), torch.finfo(dtype).tiny / 2]).to(place.device, dtype)
    before = tensor.clone().view(torch.uint8)
    (bucket,) = Replica([tensor]).buckets
    bucket.unpack(bucket.pack())
    assert torch.equal(tensor.view(torch.uint8), before)


@st.composite
def sharded(draw):
    """Whole tensors, and for each of a node's ranks its shares of them: whole rows, as FSDP2 deals them."""
    ranks = draw(st.integers(1, 4))
    shapes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=5))
    wholes = [torch.arange(float(rows * columns), device=place.device).view(rows, columns) for rows, columns in shapes]
    offset = 0
    for whole in wholes:
        whole += offset
        offset += whole.numel()
    held = [[] for _ in range(ranks)]
    for whole in wholes:
        rows = -(-len(whole) // ranks)
        for rank in range(ranks):
            part = whole[rank * rows : (rank + 1) * rows].clone()
            start = min(rank * rows, len(whole)) * whole.shape[1]
            held[rank].append((part, ShardSpec("rank", whole.numel(), start)))
    return wholes, held


@given(sharded(), st.integers(1, 9))
def test_a_cut_by_number_is_the_same_however_the_tensors_are_sharded(case, into):
    wholes, held = case
    expected = [sorted(e for b in part for e in b.pack().tolist()) for part in Replica(wholes).cut(into)]
    replicas = [Replica([t for t, _ in own], shares={id(t): share for t, share in own}) for own in held]
    parts = [replica.cut(into) for replica in replicas]
    assert {len(own) for own in parts} == {len(expected)}
    for index, elements in enumerate(expected):
        assert sorted(e for own in parts for bucket in own[index] for e in bucket.pack().tolist()) == elements
    assert {replica.whole_bytes for replica in replicas} == {Replica(wholes).nbytes}


def test_shards_are_cut_in_proportion_and_by_holders():
    columns, everywhere = torch.arange(8.0, device=place.device), torch.arange(100.0, 104.0, device=place.device)
    shares = {id(columns): ShardSpec("rank", 16)}
    replica = Replica([columns, everywhere], shares=shares)
    assert [bucket.held_by for bucket in replica.buckets] == ["node", "rank"]
    parts = replica.cut(2)
    assert [[(b.held_by, b.pack().tolist()) for b in part] for part in parts] == [
        [("rank", [0, 1, 2, 3, 4])],
        [("node", [100, 101, 102, 103]), ("rank", [5, 6, 7])],
    ]


def test_a_fragment_of_which_a_rank_holds_nothing_is_an_empty_bucket():
    first, second = torch.ones(2, device=place.device), torch.empty(0, device=place.device)
    shares = {id(first): ShardSpec("rank", 4, 0), id(second): ShardSpec("rank", 1, 1)}
    replica = Replica([first, second], named=[("a.x", first), ("b.x", second)], shares=shares)
    by_name = replica.cut(["b"])
    assert [[bucket.numel for bucket in part] for part in by_name] == [[0], [2]]
    assert by_name[0][0].pack().tolist() == []


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
def test_a_fragment_of_one_dtype_on_two_devices_counts_every_tensor_once(is_sharded):
    here, there = torch.ones(4, device=place.device), torch.ones(6, device="meta")
    shares = {id(here): ShardSpec("rank", 8, 0), id(there): ShardSpec("rank", 12, 0)} if is_sharded else None
    replica = Replica([here, there], named=[("a.x", here), ("a.y", there)], shares=shares)
    (part,) = (buckets for buckets in replica.cut(["a"]) if buckets)
    assert [(bucket.device.type, bucket.numel) for bucket in part] == [(place.device.type, 4), ("meta", 6)]
    assert all(piece.tensor.device == bucket.device for bucket in part for piece in bucket.slices)

"""Sums of encoded parts: what arrives, that it is the same everywhere, and that nothing is lost for good."""

from __future__ import annotations

import harness
import pytest
import torch
from codec_cases import same_bits

from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.blockwise import LargestFour, Quantized
from lightning_hiercomm.comm.codec import AsIs, Cast
from lightning_hiercomm.comm.encoded_sum import EncodedSum
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld

CODECS = [Quantized(8), Quantized(4), LargestFour(), Quantized(8, block=4)]
CODECS += [Cast(torch.bfloat16), Cast(torch.float16), AsIs()]
MEMBERS = [2, 3, 4, 5]
on_both = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one


def on_members(members, codec, work):
    """``work(rank, sum, meter)`` on every member, as a thread."""

    def on_rank(rank, world):
        meter = Meter()
        connect = world.connect(rank, meter)
        group = [range(members)]
        with harness.place.rank():
            return work(rank, EncodedSum(codec, connect(group, "inter"), connect(group, "inter")), meter)

    return harness.on_cpu(ThreadWorld(members).run(on_rank))


def values_of(rank, numel, dtype=torch.float32, round_=0):
    generator = torch.Generator().manual_seed(1000 * round_ + rank)
    sizes = 10.0 ** torch.randint(-6, 3, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * sizes).to(dtype)


def values_here(rank, numel, dtype=torch.float32, round_=0):
    return values_of(rank, numel, dtype, round_).to(harness.place.device)


def decoded(codec, values):
    return codec.decode(codec.encode(values), torch.empty_like(values))


def plainly(codec, everyones, kept_back=None, kept_back_of_sums=None):
    """The sum of ``everyones`` parts, calculated in one place; changes the residues."""
    members, numel = len(everyones), everyones[0].numel()
    length = numel if members == 2 else -(-numel // members)
    if length >= 64 * codec.block:
        length = -(-length // codec.block) * codec.block
    chunks = []
    for start in range(0, numel, length):
        chunk = slice(start, start + length)
        total = None
        for m, values in enumerate(everyones):
            wanted = values[chunk] if kept_back is None else values[chunk] + kept_back[m][chunk]
            arrived = decoded(codec, wanted)
            if kept_back is not None:
                kept_back[m][chunk] = wanted - arrived
            total = arrived if total is None else total + arrived
        if members > 2:
            if kept_back_of_sums is not None:
                total = total + kept_back_of_sums[chunk]
            arrived = decoded(codec, total)
            if kept_back_of_sums is not None:
                kept_back_of_sums[chunk] = total - arrived
            total = arrived
        chunks.append(total)
    return torch.cat(chunks)


@on_both
@pytest.mark.parametrize("feeds_back", [False, True])
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("members", MEMBERS)
def test_every_round_gives_everyone_the_bits_of_a_plain_calculation(members, codec, feeds_back):
    lengths = [1, 2, 3, 5, 7, 255, 256, 257, 1000, 64 * 4 * members + 1, 5000]
    if feeds_back:
        lengths = [1003] * 4

    def work(rank, encoded_sum, meter):
        feedback = encoded_sum.feedback(torch.empty(1003, device=harness.place.device)) if feeds_back else None
        parts = [values_here(rank, numel, round_=i) for i, numel in enumerate(lengths)]
        for part in parts:
            encoded_sum.launch(part, feedback)()
        return parts

    kept_back = [torch.zeros(members, 1003), torch.zeros(1003)] if feeds_back else []
    for i, parts in enumerate(zip(*on_members(members, codec, work), strict=True)):
        everyones = [values_of(rank, lengths[i], round_=i) for rank in range(members)]
        expected = plainly(codec, everyones, *kept_back)
        for part in parts:
            assert same_bits(part, expected), (i, lengths[i])


@on_both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("codec", [Quantized(8), AsIs()], ids=str)
@pytest.mark.parametrize("members", [2, 4])
def test_narrow_floats_are_summed_in_float32_and_rounded_once(members, codec, dtype):
    wide = torch.promote_types(dtype, torch.float32)

    def work(rank, encoded_sum, meter):
        part = values_here(rank, 3000, dtype)
        feedback = encoded_sum.feedback(part)
        assert feedback.sender.dtype == feedback.reducer.dtype == wide
        encoded_sum.launch(part, feedback)()
        return part

    expected = plainly(codec, [values_of(rank, 3000, dtype).to(wide) for rank in range(members)]).to(dtype)
    assert all(same_bits(part, expected) for part in on_members(members, codec, work))


@on_both
@pytest.mark.parametrize("codec", [AsIs(), Cast(torch.bfloat16), Quantized(8)], ids=str)
@pytest.mark.parametrize("members", MEMBERS)
def test_everyone_has_the_same_bits_even_of_sums_of_different_nans(members, codec):
    def work(rank, encoded_sum, meter):
        bits = torch.full((100,), 0x7FC00000 + (rank << 16), dtype=torch.int32, device=harness.place.device)
        part = bits.view(torch.float32) * (-1 if rank % 2 else 1)
        encoded_sum.launch(part)()
        assert part.isnan().all()
        return part

    first, *others = on_members(members, codec, work)
    assert all(same_bits(other, first) for other in others)


@on_both
def test_alone_nothing_moves_and_nothing_changes():
    def work(rank, encoded_sum, meter):
        part = values_here(rank, 300)
        before, feedback = part.clone(), encoded_sum.feedback(part)
        encoded_sum.launch(part, feedback)()
        assert same_bits(part, before)
        assert not feedback.sender.any()
        assert not meter.messages["inter"]

    on_members(1, Quantized(4), work)


@on_both
@pytest.mark.parametrize("members", MEMBERS)
def test_a_part_without_elements_sums_to_one(members):
    def work(rank, encoded_sum, meter):
        part = torch.empty(0, device=harness.place.device)
        encoded_sum.launch(part, encoded_sum.feedback(part))()

    on_members(members, Quantized(8), work)


@on_both
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("members", MEMBERS)
def test_every_member_sends_the_bytes_of_an_all_reduce_of_the_payload(members, codec):
    numel = members * 64 * 256

    def work(rank, encoded_sum, meter):
        part = values_here(rank, numel)
        encoded_sum.launch(part, encoded_sum.feedback(part))()
        return meter.bytes["inter"]

    expected = 2 * (members - 1) / members * codec.payload_bytes(numel, torch.float32)
    assert on_members(members, codec, work) == pytest.approx([expected] * members, rel=1e-12)


@on_both
@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("codec", [Quantized(8), Quantized(4), Cast(torch.float16)], ids=str)
def test_non_finite_values_reach_all_ranks_and_leave_no_residual(codec, bad, members):
    def work(rank, encoded_sum, meter):
        feedback = encoded_sum.feedback(torch.empty(1000, device=harness.place.device))
        parts = [torch.full((1000,), 1.0, device=harness.place.device) for _ in range(2)]
        if rank == members - 1:
            parts[0][700] = bad
        for part in parts:
            encoded_sum.launch(part, feedback)()
        assert feedback.sender.isfinite().all()
        assert feedback.reducer.isfinite().all()
        return parts

    for first, second in on_members(members, codec, work):
        assert not first[700].isfinite()
        assert first[:100].isfinite().all()
        torch.testing.assert_close(second, torch.full((1000,), float(members)), rtol=0.02, atol=0)


@on_both
@pytest.mark.parametrize("members", MEMBERS)
def test_a_restored_feedback_goes_on_bit_by_bit(members):
    def work(rank, encoded_sum, meter):
        feedback = encoded_sum.feedback(torch.empty(1003, device=harness.place.device))
        for i in range(3):
            encoded_sum.launch(values_here(rank, 1003, round_=i), feedback)()
        state = feedback.state_dict()
        copies = {name: tensor.clone() for name, tensor in state.items()}
        part = values_here(rank, 1003, round_=3)
        encoded_sum.launch(part, feedback)()
        assert all(same_bits(state[name], copies[name]) for name in copies)
        restored = encoded_sum.feedback(torch.empty(1003, device=harness.place.device))
        restored.load_state_dict(state)
        again = values_here(rank, 1003, round_=3)
        encoded_sum.launch(again, restored)()
        fresh = values_here(rank, 1003, round_=3)
        encoded_sum.launch(fresh, encoded_sum.feedback(fresh))()
        assert same_bits(again, part)
        assert same_bits(restored.sender, feedback.sender)
        assert same_bits(restored.reducer, feedback.reducer)
        assert not same_bits(fresh, part)

    on_members(members, Quantized(4), work)


@on_both
def test_a_feedback_of_another_part_is_refused():
    def work(rank, encoded_sum, meter):
        state = encoded_sum.feedback(torch.empty(12, device=harness.place.device)).state_dict()
        with pytest.raises(ValueError, match="saved sender feedback has 12 elements, and this run's 1:"):
            encoded_sum.feedback(torch.empty(1, device=harness.place.device)).load_state_dict(state)
        with pytest.raises(ValueError, match="saved reducer feedback has 1 elements, and this run's 4:"):
            encoded_sum.feedback(torch.empty(12, device=harness.place.device)).load_state_dict(
                {**state, "reducer": torch.zeros(1)}
            )

    on_members(3, Quantized(8), work)


def sum_among_three(rank):
    groups = ((0, 1, 2), (3,))
    encoded_sum = EncodedSum(Quantized(4), rank.group(groups, "inter"), rank.group(groups, "inter", duplicate=1))
    background = Background(torch.device("cpu"), rank.meter)
    feedback = encoded_sum.feedback(torch.empty(300_001))
    parts, handles = [], []
    for i in range(3):
        parts.append(values_of(rank.rank, 300_001, round_=i))
        handles.append(background.submit(encoded_sum.launch(parts[-1], feedback)))
    for handle in handles:
        handle.wait()
    background.close()
    return parts


@pytest.mark.parametrize("world", ["threads", "gloo"], indirect=True)
def test_three_of_four_sum_three_parts_at_once(world):
    kept_back, of_sums = torch.zeros(3, 300_001), torch.zeros(300_001)
    results = world.run(sum_among_three)
    for i in range(3):
        everyones = [values_of(rank, 300_001, round_=i) for rank in range(3)]
        expected = plainly(Quantized(4), everyones, kept_back, of_sums)
        for rank in range(3):
            assert same_bits(results[rank][i], expected)
        assert same_bits(results[3][i], values_of(3, 300_001, round_=i))

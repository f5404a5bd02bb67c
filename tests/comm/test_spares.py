from __future__ import annotations

import torch

from lightning_hiercomm.comm.spares import Spares

CPU = torch.device("cpu")


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def test_a_returned_buffer_is_reused_for_any_dtype():
    spares = Spares()
    taken = spares.take(1000, torch.float32, CPU)
    assert taken.shape == (1000,)
    spares.give_back(taken)
    again = spares.take(1900, torch.bfloat16, CPU)
    assert address(again) == address(taken)
    assert (again.shape, again.dtype) == ((1900,), torch.bfloat16)


def test_a_buffer_in_use_is_not_handed_out_twice():
    spares = Spares()
    assert address(spares.take(1000, torch.float32, CPU)) != address(spares.take(1000, torch.float32, CPU))


def test_no_more_than_64_mib_are_kept():
    spares = Spares()
    taken = [spares.take(2**20, torch.float32, CPU) for _ in range(20)]
    for tensor in taken:
        spares.give_back(tensor)
    known = {address(tensor) for tensor in taken}
    again = [spares.take(2**20, torch.float32, CPU) for _ in range(20)]
    assert sum(address(tensor) in known for tensor in again[:16]) == 16
    assert sum(spare.nbytes for spare in spares.kept) == 0


def test_memory_from_inference_mode_can_be_written_in_training():
    spares = Spares()
    with torch.inference_mode():
        spares.give_back(kept := spares.take(10, torch.float32, CPU))
    taken = spares.take(10, torch.float32, CPU)
    assert address(taken) == address(kept)
    torch.mul(torch.ones(10), 2.0, out=taken)
    taken.add_(1.0)
    assert taken.tolist() == [3.0] * 10

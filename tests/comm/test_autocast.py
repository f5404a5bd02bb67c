"""An autocast is left, and entered again, as it was."""

from __future__ import annotations

import torch

from lightning_hiercomm.comm.autocast import Autocast, outside_autocast


def kind() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_an_autocast_is_left_and_entered_again_as_it_was():
    with torch.autocast("cpu", torch.float16):
        autocast = Autocast()
        with autocast.left():
            assert kind() == torch.float32
            with autocast.entered():
                assert kind() == torch.float16
            assert kind() == torch.float32
        assert kind() == torch.float16
    with torch.autocast("cpu", torch.bfloat16, enabled=False), Autocast().entered():
        assert kind() == torch.float32


def test_a_function_outside_of_autocast_computes_in_its_arguments_types():
    with torch.autocast("cpu", torch.bfloat16):
        assert outside_autocast()(kind)() == torch.float32
        assert kind() == torch.bfloat16
    assert outside_autocast()(kind)() == torch.float32

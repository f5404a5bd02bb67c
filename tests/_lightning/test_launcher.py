"""What a rank does first."""

from __future__ import annotations

import gc

import torch

from lightning_hiercomm._lightning.launcher import settle_as_fork


def test_a_forked_rank_has_its_threads_before_a_backward_pass_asks_for_them(monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    settle_as_fork("spawn")
    assert asked == []
    settle_as_fork("fork")
    assert asked == [torch.get_num_threads()]

"""What the communicator over torch's process groups does by itself, whichever backend carries it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.torch import TorchCommunicator


@pytest.mark.parametrize("is_nccl", [True, False])
def test_nccl_meets_once_before_exchanges_of_some_members_only(is_nccl, monkeypatch):
    meetings: list[object] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "all_gather_object", lambda values, value, group: meetings.append(group))
    lane = TorchCommunicator(None, [0], 0, "inter", Meter())
    lane.is_nccl = is_nccl
    lane.expect_exchanges()
    lane.expect_exchanges()
    assert len(meetings) == int(is_nccl)


def test_a_device_whose_order_of_work_is_not_known_is_refused():
    from lightning_hiercomm.comm import streams

    for known in ("cpu", "cuda"):
        streams.check_known(torch.device(known))
    for other in ("mps", "xpu", "hpu", "xla"):
        with pytest.raises(ValueError, match=rf"'{other}' devices .*accelerator='gpu'.*accelerator='cpu'"):
            streams.check_known(torch.device(other))

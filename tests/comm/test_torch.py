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


@pytest.fixture
def over_gloo() -> TorchCommunicator:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return TorchCommunicator(None, [0], 0, "inter", Meter())


@pytest.mark.parametrize(("backend", "is_nccl"), [("gloo", False), ("nccl", True), ("cpu:gloo,cuda:nccl", True)])
def test_nccl_is_known_for_what_it_is_where_a_group_has_a_backend_for_each_device(
    over_gloo, monkeypatch, backend, is_nccl
):
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    assert TorchCommunicator(None, [0], 0, "inter", Meter()).is_nccl == is_nccl


class Work:
    """Of gloo with a GPU's tensor: only a wait knows of the stream that copies the result back."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def get_future(self) -> None:
        raise AssertionError("gloo's future does not know of the copy back")


def test_a_future_of_gloo_s_for_a_gpu_s_tensor_waits_for_the_copy_back(over_gloo, pretended):
    work, bucket = Work(), torch.ones(3)
    handle = over_gloo._launch(lambda: [work], [bucket])
    assert handle.future(bucket).wait() is bucket
    assert work.waits == 1


def test_gloo_gets_no_address_of_a_gpu_s_memory(over_gloo, pretended, monkeypatch):
    posted = []

    def post(send, receive, tag):
        posted.extend((*send, *receive))
        for (sent, _), (received, _) in zip(send, receive, strict=True):
            received.copy_(sent)
        return []

    monkeypatch.setattr(over_gloo, "_post", post)
    with pretended.watching():
        sent, received = torch.arange(3.0), torch.zeros(3)
        handle = over_gloo._exchange([(sent, 1)], [(received, 1)])
        handle.wait()
        assert pretended.waits == ["an event"]
        assert received.tolist() == [0.0, 1.0, 2.0]
    assert len(posted) == 2
    assert not {tensor.data_ptr() for tensor, _ in posted} & {sent.data_ptr(), received.data_ptr()}

"""torch's HierarchicalModelAverager with DDP and the post-local SGD hook, as in its documentation."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.plain import node_group
from benchmarks.job import Recorder


def train(recorder: Recorder, options: dict[str, Any]) -> None:
    model = recorder.model()
    optimizer = recorder.optimizer(model)
    distributed = DistributedDataParallel(model)
    state = PostLocalSGDState(process_group=None, subgroup=node_group(recorder.world), start_localSGD_iter=0)
    distributed.register_comm_hook(state, post_localSGD_hook)
    averager = HierarchicalModelAverager(OrderedDict([(options["sync_every"], recorder.world.size)]))

    last = False
    while not last:
        optimizer.zero_grad()
        recorder.loss(distributed, recorder.next_batch()).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
        last = recorder.step_done()
        if recorder.evaluation_due() and not last:
            recorder.evaluate_mean(model)
    recorder.finish(model)

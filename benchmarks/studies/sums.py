"""How exact is the mean of what nodes send, for each way to carry and to sum it?

Nodes train the character model from common weights for some local steps. Their differences from these weights are
summed, each times 1 / nodes, in the ways below, and compared with the float64 sum of the differences as they were:

- ``all-reduce``: bfloat16 payloads added in bfloat16 one after another, as a ring all-reduce adds them;
- ``float32 sum``: the same payloads added in float32, and the sum not rounded: no two rounds can do better;
- ``EncodedSum``: what :class:`~lightning_hiercomm.comm.encoded_sum.EncodedSum` makes of them, with each codec.

The error is that of the vector, relative: ``|sum - exact| / |exact|``. The first column is of the first round; the
second of the mean over rounds with the same differences, with error feedback where sums are encoded: does it average
out? The third is how much of the first sum's length along the exact one is missing: do small contributions drop out?

    python -m benchmarks.studies.sums
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.workloads import WORKLOADS, Batch, loss_of
from lightning_hiercomm.comm.codec import Codec
from lightning_hiercomm.comm.encoded_sum import EncodedSum, Feedback
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.comm.wire import codec_named

ROUNDS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 16, 64])
    parser.add_argument("--local-steps", type=int, default=32)
    parser.add_argument("--warm-up", type=int, default=200, help="steps before the nodes part")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    everyones = differences(max(arguments.nodes), arguments.local_steps, arguments.warm_up)
    ways: dict[str, Callable[[Sequence[Tensor]], list[Tensor]]] = {
        "bfloat16, all-reduce": one_after_another,
        "bfloat16, float32 sum": in_float32,
    }
    for wire in ("bfloat16", "int8", "int4"):
        ways[f"{wire}, EncodedSum"] = partial(encoded, codec_named(wire))
    print(f"| nodes | how | error of one round | of the mean of {ROUNDS} | missing length |\n|--:|---|--:|--:|--:|")
    for nodes in arguments.nodes:
        shares = [difference / nodes for difference in everyones[:nodes]]
        exact = torch.stack(shares).double().sum(0)
        for name, way in ways.items():
            sums = [total.double() for total in way(shares)]
            mean = torch.stack(sums).mean(0)
            missing = 1 - float(sums[0] @ exact / (exact @ exact))
            errors = [relative(total, exact) for total in (sums[0], mean)]
            print(f"| {nodes} | {name} | {errors[0]:.5f} | {errors[1]:.5f} | {missing:+.6f} |", flush=True)


def differences(nodes: int, local_steps: int, warm_up: int) -> list[Tensor]:
    """How far each node's local steps of AdamW lead away from common weights."""
    workload = WORKLOADS["characters"]
    model = workload.model()
    train(model, workload.batches(nodes, nodes + 1, 0), warm_up)
    common = parameters_to_vector(model.parameters()).detach().clone()
    result = []
    for node in range(nodes):
        vector_to_parameters(common.clone(), model.parameters())
        train(model, workload.batches(node, nodes + 1, 1), local_steps)
        result.append(common - parameters_to_vector(model.parameters()).detach())
    return result


def train(model: torch.nn.Module, batches: Iterator[Batch], steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, next(batches)).backward()
        optimizer.step()


def one_after_another(shares: Sequence[Tensor]) -> list[Tensor]:
    """As many sums in bfloat16 as there are rounds; in a ring every chunk's sum begins at another node."""
    sums = []
    for first in range(ROUNDS):
        total = shares[first % len(shares)].bfloat16()
        for offset in range(1, len(shares)):
            total = total + shares[(first + offset) % len(shares)].bfloat16()
        sums.append(total.float())
    return sums


def in_float32(shares: Sequence[Tensor]) -> list[Tensor]:
    """The same sum in every round."""
    return [torch.stack([share.bfloat16().float() for share in shares]).sum(0)] * ROUNDS


def encoded(codec: Codec, shares: Sequence[Tensor]) -> list[Tensor]:
    """The sums of all rounds, the first without feedback yet."""

    def on_node(node: int, world: ThreadWorld) -> list[Tensor]:
        connect = world.connect(node)
        group = connect([range(len(shares))], "inter")
        assert group is not None
        encoded_sum = EncodedSum(codec, group, group)
        feedback: Feedback = encoded_sum.feedback(shares[node])
        sums = []
        for _ in range(ROUNDS):
            part = shares[node].clone()
            encoded_sum.launch(part, feedback)()
            sums.append(part)
        return sums

    return ThreadWorld(len(shares), timeout=120).run(on_node)[0]


def relative(total: Tensor, exact: Tensor) -> float:
    return float((total - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()

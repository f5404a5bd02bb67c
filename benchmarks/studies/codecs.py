"""How long does a GPU take to encode, sum and decode payloads, compared with a copy of the values?

Each operation runs with Triton's kernels and with PyTorch's operations. A copy reads and writes every float32 value
once. The last column is the number of kernels, counted by torch's profiler.

    python -m benchmarks.studies.codecs
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from unittest.mock import patch

import torch

from lightning_hiercomm.comm import fused
from lightning_hiercomm.comm.wire import codec_named

REPETITIONS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=64 * 2**20, help="number of values")
    numel = parser.parse_args().values
    if not torch.cuda.is_available():
        parser.error("no GPU that torch can use")
    values, residual = torch.randn(2, numel, device="cuda")
    copied = milliseconds(lambda: residual.copy_(values))
    print(f"{torch.cuda.get_device_name()}, {numel} values, a copy takes {copied:.3f} ms\n")
    print("| wire | operation | with | ms | copies | kernels |\n|---|---|---|--:|--:|--:|")
    for wire in ("int8", "int4", "sparse2"):
        codec = codec_named(wire)
        payload = codec.encode(values)
        operations: dict[str, Callable[[], object]] = {
            "encode with feedback": lambda: codec.encode(values, payload, residual=residual),  # noqa: B023
            "add one": lambda: codec.add_decoded(payload[None], values, 0),  # noqa: B023
            "add one, encode": lambda: codec.add_and_encode(payload[None], values, 0, payload, residual),  # noqa: B023
            "decode": lambda: codec.decode(payload, values),  # noqa: B023
        }
        for name, operation in operations.items():
            for how, works in (("Triton", True), ("PyTorch", False)):
                with patch.object(fused.runtime, "works", works):
                    taken, kernels = milliseconds(operation), kernels_of(operation)
                print(f"| {wire} | {name} | {how} | {taken:.3f} | {taken / copied:.1f} | {kernels} |", flush=True)


def milliseconds(operation: Callable[[], object]) -> float:
    """The median time of an operation, after three others."""
    taken = []
    for _ in range(3 + REPETITIONS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        operation()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return sorted(taken[3:])[REPETITIONS // 2]


def kernels_of(operation: Callable[[], object]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        operation()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


if __name__ == "__main__":
    main()

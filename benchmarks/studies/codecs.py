"""How fast do codecs pass over memory, on one thread of a CPU?

Buckets of 4 MiB, more of them than a processor's caches hold, are encoded and decoded in turn with plain copies of as
many bytes, so that whatever else runs on the machine slows all of them. A rate is in GB of float32 values per second;
the last two columns are the time of an operation divided by that of ``memcpy`` and of the cast to bfloat16.

- ``encode``: of values that stay as they are;
- ``encode with feedback``: as ``AllReduce`` encodes gradients, which adds the residual, computes the new one, and
  leaves the decoded values;
- ``decode and add``: as ``AllReduce`` adds what a peer has sent.

    python -m benchmarks.studies.codecs
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from lightning_hiercomm.comm.codec import codec_named

_MEMCPY, _CAST = "memcpy", "cast to bfloat16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=4.0, help="of float32 values in a bucket")
    parser.add_argument("--buckets", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    print(table(measured(int(arguments.mib * 2**18), arguments.buckets, arguments.rounds), arguments.mib))


def operations(numel: int, buckets: int) -> dict[str, Callable[[int], object]]:
    """What is measured, by name; each takes the number of a bucket."""
    values = [torch.randn(numel) for _ in range(buckets)]
    others = [torch.empty(numel) for _ in range(buckets)]
    residuals = [torch.zeros(numel) for _ in range(buckets)]
    narrow = [torch.empty(numel, dtype=torch.bfloat16) for _ in range(buckets)]
    found: dict[str, Callable[[int], object]] = {
        _MEMCPY: lambda i: others[i].copy_(values[i]),
        _CAST: lambda i: narrow[i].copy_(values[i]),
    }
    for name in ("int8", "int4", "top4"):
        codec = codec_named(name)
        payloads = [codec.encode(each) for each in values]
        found |= {
            f"{name}, encode": lambda i, c=codec, p=payloads: c.encode(values[i], p[i]),
            f"{name}, decode": lambda i, c=codec, p=payloads: c.decode(p[i], others[i]),
            f"{name}, encode with feedback": lambda i, c=codec, p=payloads: c.encode_with_feedback(
                others[i], residuals[i], p[i]
            ),
            f"{name}, decode and add": lambda i, c=codec, p=payloads: c.add_decoded(p[i].unsqueeze(0), others[i], 0),
        }
    return found


def measured(numel: int, buckets: int, rounds: int) -> dict[str, float]:
    """Seconds for a bucket by operation: medians over rounds; every operation has its turn in each."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {}
    todo = operations(numel, buckets)
    for _ in range(rounds + 1):
        for name, work in todo.items():
            began = time.perf_counter()
            for index in range(buckets):
                work(index)
            seconds.setdefault(name, []).append((time.perf_counter() - began) / buckets)
    return {name: median(each[1:]) for name, each in seconds.items()}  # the first round finds no memory yet


def table(seconds: dict[str, float], mib: float) -> str:
    """In Markdown."""
    lines = [
        f"| bucket of {mib:g} MiB | ms | GB/s | time, of memcpy | time, of the cast to bfloat16 |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, each in seconds.items():
        ratios = f"{each / seconds[_MEMCPY]:.2f} | {each / seconds[_CAST]:.2f}"
        lines.append(f"| {name} | {1e3 * each:.2f} | {mib * 2**20 / each / 1e9:.1f} | {ratios} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

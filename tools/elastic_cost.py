"""What it costs nodes that may leave that they may, as long as none does.

``python -m tools.elastic_cost``, in a checkout. Two nodes on this machine agree again and again. Of each agreement the
time is taken for asking the lighthouse who is there, for remembering what may have to be taken back, and for the vote.
Nodes of one machine do not come to an agreement at the same moment; they would wait for each other in any exchange, so
what counts is the node that waited least.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
for folder in (TESTS, TESTS / "startup", TESTS / "jobs"):
    sys.path.append(str(folder))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS / "startup"), *filter(None, [os.environ.get("PYTHONPATH")])])

from elastic_cluster import Cluster  # noqa: E402
from forked import ForkedPython  # noqa: E402

PARTS = ("quorum", "snapshot", "vote")
QUORUMS = {"diloco": 1, "streaming": 4}
"""How many a period of each scheme has: streaming has two fragments, each of which leaves and is merged."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the median, 95 %, by drawing again 2,000 times."""
    numbers = random.Random(0)
    medians = sorted(statistics.median(numbers.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


def measure(scheme: str, ranks: int, width: int, agreements: int) -> dict[str, Any]:
    """Milliseconds of each part of an agreement: the median, and its interval."""
    with tempfile.TemporaryDirectory() as folder:
        every = 10
        nodes = Cluster(
            Path(folder), ForkedPython, 5.0, scheme=scheme, ranks=ranks, every=every, width=width, pause=0.03,
            epochs=10**6, batches=100, steps=agreements * every // QUORUMS[scheme],
        )  # fmt: skip
        with nodes:
            for node in range(2):
                nodes.start(node)
            nodes.watch(540.0, restarts=False)
        of_nodes = [json.loads((Path(folder) / f"{node}.seconds").read_text()) for node in range(2)]
    seconds = {part: [*map(min, zip(*(each[part][5:] for each in of_nodes), strict=False))] for part in PARTS}
    seconds["all"] = [*map(sum, zip(*seconds.values(), strict=False))]
    found: dict[str, Any] = {"scheme": scheme, "ranks": ranks, "parameters": 15 * width, "n": len(seconds["all"])}
    for part, values in seconds.items():
        middle, (low, high) = statistics.median(values), interval(values)
        found[part] = [round(1000 * value, 2) for value in (middle, low, high)]
    found["of ten seconds"] = round(QUORUMS[scheme] * found["all"][0] / 10_000, 6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.elastic_cost", description=__doc__.split("\n")[0])
    parser.add_argument("--agreements", type=int, default=100)
    parser.add_argument("--out", type=Path, help="a JSON file for all of it")
    chosen = parser.parse_args()
    rows = []
    columns = ["scheme", "ranks", "parameters", *PARTS, "together", "of 10 s"]
    print(f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", sep="\n")
    for scheme in QUORUMS:
        for ranks in (1, 2):
            for width in (64, 65_536):
                load = os.getloadavg()[0]
                row = measure(scheme, ranks, width, chosen.synchronizations) | {"load": round(load, 1)}
                rows.append(row)
                parts = " | ".join("{} ({} to {})".format(*row[part]) for part in (*PARTS, "all"))
                print(
                    f"| {scheme} | {ranks} | {row['parameters']:,} | {parts} | {row['of ten seconds']:.2%} |",
                    flush=True,
                )
                if chosen.out:
                    chosen.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""From records to cells."""

import pytest

from benchmarks import measure, report
from benchmarks.job import Job, Record


def record(row: str, rank: int, times: list[float], error: str | None = None) -> Record:
    ends, now = [], 100.0
    for time in times:
        now += time
        ends.append(now)
    return Record(f"{row}.0", rank, node=rank // 2, step_ends=ends, window_bytes=600, disagreement=0.5, error=error)


def test_the_slowest_rank_counts() -> None:
    job = Job("x", "ddp", "mlp85k", warmup=1, steps=2)
    records = [record("x", 0, [9, 1, 1]), record("x", 1, [9, 1, 3])]
    assert measure.seconds_per_step(job, records) == pytest.approx(2)


def test_waiting_for_a_late_rank_is_not_part_of_a_synchronization() -> None:
    job = Job("x", "periodic", "mlp85k", warmup=2, steps=4)
    early = record("x", 0, [1, 5, 1, 5, 1, 5])  # computes for 1 s, waits for 2, synchronizes in 2
    late = record("x", 1, [3, 3, 3, 3, 3, 3])
    late.step_ends = [103.0, 106.0, 109.0, 112.0, 115.0, 118.0]
    assert measure.synchronization_seconds(job, [early, late], period=2) == pytest.approx(0)


def test_synchronization_time_is_the_longest_step_less_the_usual() -> None:
    job = Job("x", "periodic", "mlp85k", warmup=4, steps=8)
    assert measure.synchronization_seconds(job, [record("x", 0, [1, 1, 1, 4] * 3)], period=4) == pytest.approx(3)


def session(rows: dict[str, list[float]]) -> list[measure.Cell]:
    jobs = [Job(f"{row}.0", row, "mlp1m", warmup=1, steps=len(times) - 1) for row, times in rows.items()]
    results = {job.id: [record(job.row, rank, rows[job.row]) for rank in range(4)] for job in jobs}
    return measure.cells(jobs, results, nodes=2, ranks_per_node=2, mbit=1000)


def test_rows_are_related_to_the_bounds_of_their_session() -> None:
    local, node, ddp = session({"local": [9, 1, 1], "node": [9, 2, 2], "ddp": [9, 4, 4]})
    assert (local.step_ms, node.step_ms, ddp.step_ms) == (1000, 2000, 4000)
    assert ddp.bound_ms == 2000  # sending takes less
    assert ddp.ratio == 2
    assert ddp.bytes_per_step == 300


def test_time_to_accuracy_is_the_first_point_that_reaches_it() -> None:
    first = Record("x", 0, 0, began=10.0, bytes_at_begin=100)
    for step, accuracy in ((8, 0.5), (16, 0.9), (24, 0.8)):
        first.evaluations.append(
            {"step": step, "seconds": 10.0 + step, "bytes": 100 + step, "accuracy": accuracy, "loss": 1}
        )
    curve = measure.learning_curve([first])
    point = measure.first_to_reach(curve, 0.85)
    assert point == {"step": 16, "seconds": 16.0, "bytes": 16, "accuracy": 0.9, "loss": 1}
    assert measure.first_to_reach(curve, 0.95) is None
    assert "not reached" in report.accuracy_table({"ddp": measure.mean_curve([curve])}, {}, 0.95)


def test_times_sooner_is_the_mean_ratio_of_the_same_seeds() -> None:
    def curve(seconds: float, accuracy: float = 0.9) -> list[dict[str, float]]:
        return [{"seconds": seconds / 2, "accuracy": 0.1}, {"seconds": seconds, "accuracy": accuracy}]

    runs = {
        "ddp": [curve(8.0), curve(4.0), curve(6.0)],
        "all_reduce_int4": [curve(2.0), curve(1.0), curve(1.5)],
        "periodic": [curve(2.0), curve(2.0), curve(1.0, accuracy=0.5)],
        "gossip": [curve(2.0, accuracy=0.5)] * 3,
    }
    ddp, int4, periodic, gossip = report.sooner_table(runs, 0.9).splitlines()[2:]
    assert ddp.endswith("| 3 of 3 | 6.00 |  |")
    assert int4.endswith("| 3 of 3 | 1.50 | 4.00, from 4.00 to 4.00 |")
    assert "| 2 of 3 | 2.00 | 2.83, from " in periodic  # the geometric mean of 4 and 2
    assert gossip.endswith("| 0 of 3 | never |  |")


def test_times_until_a_loss_are_compared_with_the_baseline_of_the_same_seed() -> None:
    def curve(losses: list[float], seconds: float) -> list[dict[str, float]]:
        return [{"step": 20.0 * n, "seconds": n * seconds, "loss": loss} for n, loss in enumerate(losses, 1)]

    runs = {
        "ddp": [curve([3.0, 2.0, 1.0], 8.0), curve([3.0, 2.5, 1.0], 8.0)],
        "all_reduce_int4": [curve([3.0, 2.2, 1.9], 1.0), curve([3.0, 2.4, 1.9], 1.0)],
        "diloco": [curve([3.0, 2.8, 2.6], 1.0)] * 2,
    }
    ddp, int4, diloco = report.sooner_to_loss(runs, step=40).splitlines()[2:]
    assert ddp.endswith("| 2 of 2 | 16.00 |  |")
    assert "| 2 of 2 | 2.50 | 6.53, from " in int4  # the geometric mean of 16/3 and 16/2
    assert diloco.endswith("| 0 of 2 | never |  |")

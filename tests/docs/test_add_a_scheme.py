"""The code of docs/howto/add_a_scheme.md, run as it is."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from harness import Rank, on_nodes
from torch.optim import SGD

from lightning_hiercomm import schemes
from lightning_hiercomm.schemes import ParameterSync, Scheme

ROOT = Path(__file__).parents[2]
HOWTO = ROOT / "docs" / "howto"
PAGE = (HOWTO / "add_a_scheme.md").read_text()
BLOCKS = {
    name: (HOWTO / name).read_text() for name in re.findall(r"generated: file / docs/howto/(schemes/\w+\.py) -->", PAGE)
}
SCHEME, ITS_TEST = "schemes/quadratic.py", "schemes/test_quadratic.py"
COMPOSITIONS = dict(re.findall(r"^\| (\S+) .* \| `(ParameterSync\(.*\))` \|$", PAGE, re.MULTILINE))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory):
    """``page(file)``: a file of the page, imported under the name it would have in the package."""
    folder, loaded = tmp_path_factory.mktemp("page"), {}

    def load(file: str) -> ModuleType:
        if file not in loaded:
            path = folder / Path(file).name
            path.write_text(BLOCKS[file])
            name = "lightning_hiercomm.schemes.quadratic" if file == SCHEME else Path(file).stem
            spec = importlib.util.spec_from_file_location(name, path)
            loaded[file] = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded[file])
        return loaded[file]

    yield load
    for module in loaded.values():
        del sys.modules[module.__name__]


def test_the_scheme_is_at_most_twenty_lines_of_code():
    lines = [line for line in BLOCKS[SCHEME].splitlines() if line.strip()]
    assert len(lines) <= 20


def test_the_tests_of_the_page_pass(page):
    page(SCHEME)
    tests = {name: test for name, test in vars(page(ITS_TEST)).items() if name.startswith("test_")}
    assert len(tests) == 4
    for test in tests.values():
        (argument,) = inspect.signature(test).parameters or (None,)
        for mark in getattr(test, "pytestmark", ()):
            for value in mark.args[1]:
                test(**{argument: value})
        if argument is None:
            test()


def test_the_schedule_of_the_page_synchronizes_after_steps_1_2_4_and_8(page):
    def synchronized_after(rank: Rank) -> list[int]:
        counts = [0]
        for _ in range(12):
            rank.train()
            counts.append(rank.scheme.state.synchronizations)
        return [step for step in range(1, 13) if counts[step] > counts[step - 1]]

    scheme = ParameterSync(schedule=page("schemes/doubling.py").Doubling())
    assert on_nodes(synchronized_after, scheme, targets=(0.0, 8.0)) == [[1, 2, 4, 8]] * 2


class Plainly:
    """Methods that the page composes, on two nodes: their change of x after every H-th step."""

    def overlap(self, x):
        x = x if self.earlier is None else [0.4 * own + 0.6 * self.mean(self.earlier) for own in x]
        self.earlier = x
        return x

    def cocod(self, x):
        if self.earlier is not None:
            x = [own + self.mean(self.earlier) - sent for own, sent in zip(x, self.earlier, strict=True)]
        self.earlier = x
        return x

    def slowmo(self, x):
        self.momentum = 0.7 * self.momentum + (self.reference - self.mean(x))
        self.reference -= self.momentum
        return [self.reference] * 2

    def noloco(self, x):
        way = self.reference - self.mean(x)
        self.momentum = 0.9 * self.momentum + way
        self.reference -= 0.7 * (way + 0.9 * self.momentum)
        return [self.reference] * 2

    earlier, momentum, reference = None, 0.0, 0.0

    def mean(self, x):
        return sum(x) / 2


METHODS = {"Overlap-Local-SGD": "overlap", "CoCoD-SGD": "cocod", "SlowMo": "slowmo", "NoLoCo": "noloco"}


@pytest.mark.parametrize("name", sorted({*METHODS, *COMPOSITIONS}))
def test_every_composition_of_the_page_is_the_method(name):
    scheme = eval(COMPOSITIONS[name], {"SGD": SGD, "partial": partial, **vars(schemes)})
    period, plain = scheme.schedule.period, Plainly()
    x, expected = [0.0, 0.0], []
    for step in range(1, 3 * period + 1):
        x = [own + 0.02 * (target - own) for own, target in zip(x, (0.0, 8.0), strict=True)]
        x = getattr(plain, METHODS[name])(x) if step % period == 0 else x
        expected.append(x)

    def work(rank: Rank) -> list[float]:
        for _ in range(3 * period):
            rank.train()
        return [value for (value,) in rank.trace]

    traces = on_nodes(work, scheme, targets=(0.0, 8.0), inner=partial(SGD, lr=0.02), dtype=torch.float64)
    for node, trace in enumerate(traces):
        assert trace == pytest.approx([values[node] for values in expected], abs=1e-12)


# One step an epoch, by SGD at 1/2 towards 0 and 8. The means of the losses are 2, 1.95, 1 and 1: the second and the
# fourth are not 5 % below the best so far. Node 0 alone would see its loss rise at first, and node 1 its own fall.
LOSSES = [(1.0, 3.0), (1.5, 2.4), (1.0, 1.0), (0.5, 1.5)]
AT_PLATEAU = [(0, 4), (3, 3), (1.5, 5.5), (3.75, 3.75)]


def epochs(rank: Rank, first: int, last: int) -> list[float]:
    seen = []
    for epoch in range(first, last):
        rank.scheme.begin_epoch(epoch)
        rank.train(last=True)
        rank.scheme.end_epoch(torch.tensor(LOSSES[epoch][rank.node]))
        seen.append(rank.values.item())
    return seen


def at_plateau(page) -> Scheme:
    return page("schemes/at_plateau.py").AtPlateau()


def test_plateau_scheme_averages_only_after_epochs_without_progress(page):
    def work(rank: Rank) -> tuple[list[float], int]:
        return epochs(rank, 0, 4), rank.scheme.state.synchronizations

    for node, (seen, synchronizations) in enumerate(on_nodes(work, at_plateau(page), targets=(0.0, 8.0))):
        assert seen == [values[node] for values in AT_PLATEAU]
        assert synchronizations == 2


@pytest.mark.parametrize("after", range(1, 4))
def test_a_resumed_run_knows_the_best_loss_so_far(page, after):
    def first(rank: Rank) -> dict:
        epochs(rank, 0, after)
        return rank.state()

    def second(rank: Rank) -> list[float]:
        rank.load(saved[rank.rank])
        return epochs(rank, after, 4)

    saved = on_nodes(first, at_plateau(page), targets=(0.0, 8.0))
    for node, seen in enumerate(on_nodes(second, at_plateau(page), targets=(0.0, 8.0))):
        assert seen == [values[node] for values in AT_PLATEAU[after:]]


def test_a_training_step_without_a_loss_is_refused(page):
    with pytest.raises(ValueError, match="returns the loss"):
        on_nodes(lambda rank: rank.scheme.end_epoch(None), at_plateau(page))


def elastic(page, **arguments) -> ParameterSync:
    return ParameterSync(merge=page("schemes/elastic.py").Elastic(0.5), **arguments)


def test_elastic_averaging_follows_the_numbers_and_ends_on_the_mean(page):
    # with alpha = 1/4 and beta = 1/2, by local steps to (0, 4) and (0, 5.5):
    # x = (0, 4) - (0, 4) / 4, c = 0 + 2 / 2;  then x = (0, 5.5) - (-1, 4.5) / 4; what is seen are the means of x
    def work(rank: Rank) -> list[float]:
        seen = []
        for _ in range(2):
            rank.train()
            seen += [rank.values.item(), rank.averaged().item()]
        centre = rank.scheme.state_dict(shared=True)["outer"]["state"][0]["reference"].item()
        rank.scheme.finish()
        return [*seen, centre, rank.values.item()]

    ends = [1.875, 2.3125]  # c = 1 + (2.75 - 1) / 2
    assert on_nodes(work, elastic(page, schedule=1), targets=(0.0, 8.0)) == [
        [0, 1.5, 0.25, 2.3125, *ends],
        [3, 1.5, 4.375, 2.3125, *ends],
    ]

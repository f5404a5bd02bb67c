"""All optimizers of torch and pytorch_optimizer, where shards are stepped: as in one process, or refused by name."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from harness import Rank, on_nodes
from torch.nn.utils import parameters_to_vector

from lightning_hiercomm.schemes import DiLoCo, Scheme, StepsDelay

package = pytest.importorskip("pytorch_optimizer")
pytestmark = pytest.mark.nightly

NODES = ((0, 1), (2,))
SHAPES = {"a": (6, 5), "b": (6,), "c": (1,)}
STEPS, PERIOD, START, INNER_RATE = 6, 2, 0.5, 0.05
NEEDS = {"ranger21": {"num_iterations": 100}, "bsam": {"num_data": 100}}
IN_GROUPS = ("adago", "adamuon", "muon", "muonclip", "normuon")
"""They want matrices and other parameters in groups."""

ELEMENTWISE = (
    "torch.SGD torch.Adam torch.AdamW torch.NAdam torch.RAdam torch.ASGD torch.RMSprop torch.Rprop torch.Adagrad"
    " torch.Adadelta torch.Adamax accsgd adabelief adabound adamod adan adapnm ademamix adopt diffgrad exadam ftrl"
    " grams laprop lion padam pnm qhadam qhm schedulefreesgd sgdw signsgd tiger yogi"
)
"""Known to update each element by itself; these must be served by every scheme, or count in param groups."""


def classes() -> Iterator[tuple[str, Any]]:
    for name, kind in vars(torch.optim).items():
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            yield f"torch.{name}", kind
    for name in package.get_supported_optimizers():
        if name != "distributedmuon":  # it communicates
            yield name, package.load_optimizer(name)


KINDS = dict(classes())


def maker(name: str) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        given: Any = parameters
        if name in IN_GROUPS:
            parted = [[p for p in parameters if (p.dim() == 2) == is_matrix] for is_matrix in (True, False)]
            given = [{"params": part, "use_muon": flag} for part, flag in zip(parted, (True, False), strict=True)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer: torch.optim.Optimizer = KINDS[name](given, lr=0.01, **NEEDS.get(name, {}))
        return optimizer

    return make


WAYS = ("DiLoCo", "StepsDelay")


def target_of(shapes: Any) -> torch.Tensor:
    """Return the target of all ranks, so that their mean gradient is that of one process."""
    return 2 * torch.randn(sum(map(math.prod, shapes.values())), generator=torch.Generator().manual_seed(0))


def alone(make: Any, way: str, shapes: Any, nearly: float = 0.0) -> torch.Tensor:
    """Step in one process, with gradients, or with the difference that a period of SGD makes."""
    parameters = [torch.nn.Parameter(torch.full(shape, START)) for shape in shapes.values()]
    optimizer, target = make(parameters), target_of(shapes)
    for _ in range(STEPS):
        values = parameters_to_vector(parameters).detach()
        gradient = (1 + nearly * target) * (values - target)
        if way == "DiLoCo":
            local = values
            for _ in range(PERIOD):
                local = local - INNER_RATE * (1 + nearly * target) * (local - target)
            gradient = values - local
        for parameter, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter).clone()
        optimizer.step()
    return parameters_to_vector(parameters).detach()


def on_shards(make: Any, way: str, shapes: Any) -> list[torch.Tensor]:
    """Step by shards that lie on the ranks of two nodes."""
    target = target_of(shapes)

    def work(rank: Rank) -> torch.Tensor:
        for _ in range(PERIOD * STEPS if way == "DiLoCo" else STEPS):
            rank.train(lambda x: x - target)
        return rank.values

    scheme: Scheme = StepsDelay(2, 2 * STEPS, local_update="sgd")
    if way == "DiLoCo":
        scheme, make = DiLoCo(PERIOD, make), partial(torch.optim.SGD, lr=INNER_RATE)
    return on_nodes(work, scheme, NODES, shapes=shapes, start=START, inner=make, bucket_bytes=64)


def outcome(name: str, way: str) -> tuple[str, str]:
    """``"right"``, ``"refused"``, ``"unusable"`` (in one process, too), ``"random"`` or ``"wrong"``; and the reason."""
    make, shapes = maker(name), {"a": (6, 5)} if name == "torch.Muon" else SHAPES
    try:
        torch.manual_seed(0)
        expected = alone(make, way, shapes)
        other = alone(make, way, shapes, nearly=1e-6)
        torch.manual_seed(1)
        random = alone(make, way, shapes)
    except Exception as error:
        return "unusable", f"{type(error).__name__}: {error}"
    if not torch.equal(expected, random):
        return "random", ""
    try:
        values = on_shards(make, way, shapes)
    except Exception as error:
        is_named = KINDS[name].__name__.lower() in str(error).lower()
        return ("refused" if is_named and isinstance(error, ValueError) else "wrong"), f"{type(error)}: {error}"
    largest = max(float((each - expected).abs().max()) for each in values)
    moved = float((expected - START).abs().max())
    unstable = float((expected - other).abs().max())  # what rounding does: some decompose matrices of low rank
    is_right = largest <= 1e-3 * moved + 1e-6 + 20 * unstable
    return "right" if is_right else "wrong", f"{largest:.2g} of {moved:.2g}, {unstable:.2g} by rounding"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_an_optimizer_is_right_or_refused_by_name(name, way):
    found, reason = outcome(name, way)
    assert found != "wrong", reason
    if found == "unusable":
        pytest.skip(reason[:200])
    if " in param_groups, which only the program may change" in reason:
        assert not name.startswith("torch."), reason
    elif name in ELEMENTWISE.split():
        assert found in ("right", "random"), reason

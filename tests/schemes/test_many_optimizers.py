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

NODES, WEIGHTS = ((0, 1), (2,)), (2 / 3, 1 / 3)
SHAPES = {"a": (6, 5), "b": (6,), "c": (1,)}
STEPS, PERIOD, START = 6, 2, 0.5
INNER_RATE = 0.05
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


def targets(shapes: Any) -> list[torch.Tensor]:
    numel = sum(map(math.prod, shapes.values()))
    return [2 * torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]


def of_nodes(shapes: Any) -> list[torch.Tensor]:
    """The mean targets of the nodes."""
    own = targets(shapes)
    return [torch.stack([own[rank] for rank in ranks]).mean(0) for ranks in NODES]


class OneProcess:
    """A replica of the parameters in this process."""

    def __init__(self, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], shapes: Any) -> None:
        self.parameters = [torch.nn.Parameter(torch.full(shape, START)) for shape in shapes.values()]
        self.optimizer = make(self.parameters)

    @property
    def values(self) -> torch.Tensor:
        return parameters_to_vector(self.parameters).detach()

    @torch.no_grad()
    def set_values(self, values: torch.Tensor) -> None:
        for parameter, part in zip(self.parameters, values.split([p.numel() for p in self.parameters]), strict=True):
            parameter.copy_(part.view_as(parameter))

    def step(self, gradient: torch.Tensor) -> None:
        for parameter, part in zip(self.parameters, gradient.split([p.numel() for p in self.parameters]), strict=True):
            parameter.grad = part.view_as(parameter).clone()
        self.optimizer.step()


SGD = partial(torch.optim.SGD, lr=INNER_RATE)


def together(make: Any, *, shapes: Any, nearly: float = 0.0) -> torch.Tensor:
    """Train as DDP does."""
    model, target = OneProcess(make, shapes), torch.stack(targets(shapes)).mean(0)
    for _ in range(STEPS):
        model.step((1 + nearly * target) * (model.values - target))
    return model.values


def apart(make: Any, *, shapes: Any, nearly: float = 0.0) -> torch.Tensor:
    """Train a replica for each node, and every second step let the optimizer step with their mean difference."""
    replicas, reference = [OneProcess(SGD, shapes) for _ in NODES], OneProcess(make, shapes)
    for step in range(STEPS):
        for replica, target in zip(replicas, of_nodes(shapes), strict=True):
            replica.step((1 + nearly * target) * (replica.values - target))
        if step % PERIOD == PERIOD - 1:
            mean = sum(weight * replica.values for weight, replica in zip(WEIGHTS, replicas, strict=True))
            reference.step(reference.values - mean)
            for replica in replicas:
                replica.set_values(reference.values)
    return reference.values


WAYS: dict[str, tuple[Callable[[Any], tuple[Scheme, Any]], Callable[..., torch.Tensor]]] = {
    "DiLoCo": (lambda make: (DiLoCo(PERIOD, make), SGD), apart),
    "StepsDelay": (lambda make: (StepsDelay(2, 2 * STEPS, local_update="sgd"), make), together),
}


def outcome(name: str, way: str) -> tuple[str, str]:
    """``"right"``, ``"refused"``, ``"unusable"`` (in one process, too), ``"random"`` or ``"wrong"``; and the reason."""
    make, (scheme_of, alone) = maker(name), WAYS[way]
    shapes = {"a": (6, 5)} if name == "torch.Muon" else SHAPES
    try:
        torch.manual_seed(0)
        expected = alone(make, shapes=shapes)
        other = alone(make, shapes=shapes, nearly=1e-6)
        torch.manual_seed(1)
        random = alone(make, shapes=shapes)
    except Exception as error:
        return "unusable", f"{type(error).__name__}: {error}"
    if not torch.equal(expected, random):
        return "random", ""
    own_targets = targets(shapes)

    def work(rank: Rank) -> torch.Tensor:
        for _ in range(STEPS):
            rank.train(lambda x: x - own_targets[rank.rank])
        return rank.values

    scheme, inner = scheme_of(make)
    try:
        values = on_nodes(work, scheme, NODES, shapes=shapes, start=START, inner=inner, bucket_bytes=64)
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
    if way == "StepsDelay" and " in param_groups, which only the program may change" in reason:
        assert not name.startswith("torch."), reason
    elif name in ELEMENTWISE.split():
        assert found in ("right", "random"), reason

"""The scaling questions of the papers, as experiments that run here in minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_hiercomm.planning.cluster import Cluster, Link, Workload
from lightning_hiercomm.planning.simulate.simulation import Experiment, Site
from lightning_hiercomm.planning.simulate.tasks import TASKS, Task
from lightning_hiercomm.schemes import (
    DASO,
    AllReduce,
    DiLoCo,
    DirectedExponential,
    Gossip,
    PeriodicAveraging,
    Scheme,
    StepsDelay,
)

_RESNET50 = 25.6e6
_GBIT = 1e9 / 8
_LEAST_STEPS = 20


@dataclass(frozen=True)
class Setting:
    """What all experiments of a preset share.

    Attributes:
        task: What is learnt.
        epochs: How often as many examples are seen as there are; the number of steps follows.
        seed: Of models and batches.
        ranks_per_node: Of the simulated nodes. Ranks of a node hold the same, so one of them may stand for all.
        wire_dtype: As for the strategy.
    """

    task: Task
    epochs: float
    seed: int = 0
    ranks_per_node: int = 1
    wire_dtype: str | None = None

    def experiment(
        self, label: str, scheme: Scheme, nodes: int, *, batch: int | None = None, scale: float | None = None
    ) -> Experiment:
        """One row.

        Args:
            label: What tables call it.
            scheme: With its arguments.
            nodes: How many.
            batch: Of a rank.
            scale: Of the learning rate against one replica's. Default: the square root of the number of replicas, which
                lets batches grow by a factor of some hundred where a linear rule diverges.
        """
        task, batch, replicas = self.task, batch or self.task.batch, nodes * self.ranks_per_node
        (_, targets), _ = task.load()
        steps = max(_LEAST_STEPS, round(self.epochs * len(targets) / (batch * replicas)))
        rate = task.learning_rate * (replicas**0.5 if scale is None else scale)
        return Experiment(
            label, scheme, nodes, steps, rate, batch, task, self.ranks_per_node, self.wire_dtype, self.seed
        )


@dataclass(frozen=True)
class Preset:
    """A question of a paper.

    Attributes:
        name: What the command line calls it.
        question: In a sentence.
        source: Whose, and where.
        site: What the virtual clock goes by; numbers that the paper does not give are named in ``source``.
        task: What is learnt unless something else is asked for.
        epochs: The same of the length.
        nodes: The same of the numbers of nodes.
        rows: Makes the experiments for a number of nodes.
    """

    name: str
    question: str
    source: str
    site: Site
    task: str
    epochs: float
    nodes: Sequence[int]
    rows: Callable[[Setting, int], Iterator[Experiment]]

    def experiments(
        self,
        nodes: Sequence[int] | None = None,
        task: str | None = None,
        epochs: float | None = None,
        seeds: int = 1,
        wire_dtype: str | None = None,
    ) -> list[Experiment]:
        """All of them, for every number of nodes and every seed."""
        learnt, length = TASKS[task or self.task], epochs or self.epochs
        settings = [Setting(learnt, length, seed, wire_dtype=wire_dtype) for seed in range(seeds)]
        return [row for count in nodes or self.nodes for setting in settings for row in self.rows(setting, count)]


def _node_based(setting: Setting, nodes: int) -> Iterator[Experiment]:
    yield setting.experiment("all-reduce", AllReduce(), nodes, scale=1)
    for every in (2, 4, 8):
        yield setting.experiment(f"K'={every}, learning rate doubled", PeriodicAveraging(every), nodes, scale=2)
    yield setting.experiment("epoch ends only, learning rate doubled", PeriodicAveraging(None), nodes, scale=2)


def _ssd_sgd(setting: Setting, nodes: int) -> Iterator[Experiment]:
    yield setting.experiment("all-reduce", AllReduce(), nodes)
    for delay in range(1, 6):
        warm_up = 60  # a multiple of all k
        yield setting.experiment(f"k={delay}, warm-up {warm_up}", StepsDelay(delay, warmup_steps=warm_up), nodes)
    for warm_up in (0, 20, 120):
        yield setting.experiment(f"k=4, warm-up {warm_up}", StepsDelay(4, warmup_steps=warm_up), nodes)


def _daso(setting: Setting, nodes: int) -> Iterator[Experiment]:
    yield setting.experiment("all-reduce", AllReduce(), nodes)
    pairs = ((1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 2), (4, 4))
    for every, staleness in pairs:
        scheme = DASO(every, staleness, warmup_epochs=0, cooldown_epochs=0, adapt=False)
        yield setting.experiment(f"B={every}, S={staleness}", scheme, nodes)


def _crossover(setting: Setting, nodes: int) -> Iterator[Experiment]:
    yield setting.experiment("all-reduce", AllReduce(), nodes)
    yield setting.experiment("Crossover-SGD", Gossip("random_permutation", segments=8), nodes)
    yield setting.experiment("Crossover-SGD, one segment", Gossip("random_permutation", segments=1), nodes)
    yield setting.experiment("SGP", Gossip(DirectedExponential(), segments=1), nodes)
    yield setting.experiment("ring", Gossip("ring", segments=1), nodes)


def _diloco(setting: Setting, nodes: int) -> Iterator[Experiment]:
    yield setting.experiment("all-reduce", AllReduce(), nodes)
    for every in (4, 16, 64):
        yield setting.experiment(f"H={every}", DiLoCo(every), nodes)
    yield setting.experiment("H=16, 2 fragments, tau=2", DiLoCo(16, fragments=2, staleness=2), nodes)
    yield setting.experiment("PeriodicAveraging(16)", PeriodicAveraging(16, at_epoch_end=False), nodes)


def _site(
    ranks_per_node: int,
    inter: float,
    parameters: float,
    step: float,
    state: float = 1.0,
    intra: float = 300e9,
    dtype: str = "float32",
) -> Site:
    links = Link(intra, 5e-6), Link(inter, 20e-6)
    workload = Workload.of_step(parameters, step, dtype=dtype, state_per_parameter=state)
    return Site(Cluster(2, ranks_per_node, *links), workload)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "000",
            "What does agreeing every K' steps, or at the end of epochs, cost with 4 to 20 nodes?",
            "Node-based communication, sections IV and V: nodes of one V100, 100 Gbit/s. The step of 80 ms and the 10"
            " Gbit/s that TCP makes of that link are ours.",
            _site(1, 10 * _GBIT, _RESNET50, 0.08),
            "digits",
            12,
            (4, 8, 12, 16, 20),
            _node_based,
        ),
        Preset(
            "001",
            "How long a delay k, and how long a warm-up?",
            "SSD-SGD, Fig. 4 and section 4: 4 nodes of 4 V100, 56 Gbit/s, ResNet-50. The step of 100 ms is ours.",
            _site(4, 56 * _GBIT, _RESNET50, 0.1, intra=10e9),
            "digits",
            12,
            (4,),
            _ssd_sgd,
        ),
        Preset(
            "002",
            "What do B and S cost, and how does that grow with the nodes?",
            "DASO, Table 2: 8 and 32 nodes of 4 A100, ResNet-50, 200 Gbit/s for each GPU. The step of 75 ms is ours.",
            _site(4, 800 * _GBIT, _RESNET50, 0.075),
            "digits",
            24,
            (4, 8, 32, 64),
            _daso,
        ),
        Preset(
            "003",
            "Who keeps the accuracy when nodes, and with them the mini-batch, grow?",
            "Crossover-SGD, Fig. 8 to 10: ResNet-50 on 8 to 64 workers. The 10 Gbit/s and the step of 200 ms are ours.",
            _site(1, 10 * _GBIT, _RESNET50, 0.2),
            "digits",
            24,
            (8, 16, 32, 64),
            _crossover,
        ),
        Preset(
            "diloco",
            "How rare may outer steps be, and with how many replicas?",
            "DiLoCo, Fig. 3 and Table 3: 400 M parameters, 1 to 16 replicas. The 1 Gbit/s, the nodes of 8 and the step"
            " of 1 s are ours.",
            _site(8, _GBIT, 4e8, 1.0, state=2.0),
            "characters",
            1,
            (1, 4, 8, 16),
            _diloco,
        ),
    )
}
"""By name."""

"""Communication graphs of gossip."""

from __future__ import annotations

import operator
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from lightning_hiercomm.arguments import Value, note_owner

Sampling = Literal["uniform", "cyclic", "roulette", "independent"]


class Graph(Value, ABC):
    """Base class of communication graphs; a custom graph is a subclass with this one method.

    Example::

        class Backwards(Graph):
            def send_to(self, size: int, step: int, fragment: int) -> list[list[int]]:
                return [[(rank - 1) % size] for rank in range(size)]
    """

    @abstractmethod
    def send_to(self, size: int, step: int, fragment: int) -> Sequence[Sequence[int]]:
        """Return, for every rank, the other ranks to which it sends.

        The result must depend on the arguments alone, so that it is equal on every rank and after a resume. Seed random
        generators with them.

        Args:
            size: The number of ranks, at least 2. With hierarchical gossip these are the nodes.
            step: The number of exchanges before this one.
            fragment: The index of the fragment of the model.
        """

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name != "_given")
        return f"{type(self).__name__}({arguments})"


class Ring(Graph):
    """Every rank exchanges with both its neighbors, as in DP-SGD (Lian et al. 2017).

    Example::

        HierarchicalStrategy(ParameterSync(2, reducer=Ring()))
    """

    def send_to(self, size: int, step: int, fragment: int) -> list[list[int]]:
        return [sorted({(rank - 1) % size, (rank + 1) % size}) for rank in range(size)]


class Full(Graph):
    """Every rank exchanges with all others: an exact average, with ``size - 1`` times the bytes and memory.

    Example::

        HierarchicalStrategy(ParameterSync(2, reducer=Full()))
    """

    def send_to(self, size: int, step: int, fragment: int) -> list[list[int]]:
        return [[peer for peer in range(size) if peer != rank] for rank in range(size)]


class DirectedExponential(Graph):
    """Rank r sends to r + 1 at the first step, then to r + 2, r + 4, ..., and repeats, as in SGP.

    With ``peers = k``, step i of a round goes to the k ranks at distances ``j (k + 1)^i``, j = 1 .. k. A round averages
    exactly if the number of ranks is a power of ``k + 1``.

    Source: Assran et al. 2019, "Stochastic Gradient Push", section 3; for several peers its code,
    ``NPeerDynamicDirectedExponentialGraph``.

    Example::

        HierarchicalStrategy(Gossip(DirectedExponential(peers=2)))

    Args:
        peers: The number of ranks to which each rank sends at a step, or fewer in small worlds.

    Raises:
        ValueError: If ``peers`` is not positive.
    """

    def __init__(self, peers: int = 1) -> None:
        if peers < 1:
            raise ValueError(f"peers={peers} must be a positive number of ranks to send to")
        self.peers = peers

    def send_to(self, size: int, step: int, fragment: int) -> list[list[int]]:
        base = self.peers + 1
        distances = [1]  # in integers: a floating-point logarithm loses the last hop for some sizes
        while distances[-1] * base < size:
            distances.append(distances[-1] * base)
        distance = distances[step % len(distances)]
        hops = [j * distance for j in range(1, base) if j * distance < size]
        return [[(rank + hop) % size for hop in hops] for rank in range(size)]


class RandomPermutation(Graph):
    """A new random permutation D for every step and fragment: rank r receives from D[r].

    Source: Yeo et al., "Crossover-SGD", section 3.2 and Algorithm 2. As printed, the algorithm divides by zero if only
    the last rank itself is left for it (9 % of the samples for 8 ranks), which is prevented here.

    Example::

        HierarchicalStrategy(Gossip(RandomPermutation(sampling="cyclic")))

    Args:
        sampling: The distribution of D. ``"uniform"``: all derangements (permutations without a fixed point) are
            equally likely. ``"cyclic"``: all permutations with a single cycle are. ``"roulette"``: as in the paper,
            each rank chooses among the ranks that are left. ``"independent"``: ranks choose independently, so that some
            send several times and some never, for comparison; gossip then uses push-sum weights.
        seed: Random seed of D, together with step and fragment.

    Raises:
        ValueError: For any other ``sampling``.
    """

    def __init__(self, sampling: Sampling = "uniform", seed: int = 0) -> None:
        self.sampling = sampling
        self.seed = seed

    def send_to(self, size: int, step: int, fragment: int) -> list[list[int]]:
        send_to: list[list[int]] = [[] for _ in range(size)]
        for rank, source in enumerate(self.receive_from(size, step, fragment)):
            send_to[source].append(rank)
        return send_to

    def receive_from(self, size: int, step: int, fragment: int) -> list[int]:
        """Return D: for every rank, the one from which it receives."""
        return list(_drawn(self.sampling, self.seed, size, step, fragment))


note_owner("RandomPermutation", ("sampling", "seed"))


@lru_cache(maxsize=4096)  # every rank calls it twice; simulations have many ranks in one process
def _drawn(sampling: Sampling, seed: int, size: int, step: int, fragment: int) -> tuple[int, ...]:
    # strings are hashed by SHA-512, equally on all machines, so neighboring seeds are independent
    generator = random.Random(f"{seed} {step} {fragment}")
    if sampling == "uniform":
        return tuple(_derangement(size, generator))
    if sampling == "cyclic":
        return tuple(_single_cycle(size, generator))
    if sampling == "roulette":
        return tuple(_roulette(size, generator))
    picks = [generator.randrange(size - 1) for _ in range(size)]
    return tuple(pick + (pick >= rank) for rank, pick in enumerate(picks))


def _derangement(size: int, generator: random.Random) -> list[int]:
    chosen = list(range(size))
    while any(rank == source for rank, source in enumerate(chosen)):  # e times on average, for any size
        generator.shuffle(chosen)
    return chosen


def _single_cycle(size: int, generator: random.Random) -> list[int]:
    chosen = list(range(size))
    for last in range(size - 1, 0, -1):  # Sattolo's algorithm
        other = generator.randrange(last)
        chosen[last], chosen[other] = chosen[other], chosen[last]
    return chosen


def _roulette(size: int, generator: random.Random) -> list[int]:
    chosen: list[int] = []
    left = set(range(size))
    for rank in range(size):
        is_forced = rank == size - 2 and size - 1 in left
        pick = size - 1 if is_forced else generator.choice(sorted(left - {rank}))
        chosen.append(pick)
        left.remove(pick)
    return chosen


@dataclass(frozen=True)
class Partners:
    """The partners of all ranks in one exchange of one fragment.

    Every rank splits its value into equal shares, one for each receiver and one to keep, and adds the received shares.
    Hence the mixing matrix is column-stochastic, and sums over ranks are conserved.

    Attributes:
        send_to: For every rank, the ranks to which it sends.
        receive_from: For every rank, the ranks from which it receives, in ascending order.
    """

    send_to: tuple[tuple[int, ...], ...]
    receive_from: tuple[tuple[int, ...], ...]

    def share(self, rank: int) -> float:
        """Return the part of its value that ``rank`` sends to each peer, p = 1 / (out-degree + 1)."""
        return 1.0 / (len(self.send_to[rank]) + 1)

    def push(self, weights: Sequence[float]) -> list[float]:
        """Return the push-sum weights of all ranks after this exchange, from those before it.

        Every rank computes them from the graph, so they are not sent. A doubly stochastic exchange keeps equal weights.
        """
        after = []
        for rank, sources in enumerate(self.receive_from):
            total = sum(weights[source] * self.share(source) for source in (rank, *sources))
            after.append(1.0 if abs(total - 1.0) < 1e-12 else total)
        return after

    def mixing_matrix(self) -> Tensor:
        """Return float64 ``[r, q]``: the part of rank q's value that ends with rank r."""
        size = len(self.send_to)
        matrix = torch.zeros(size, size, dtype=torch.float64)
        for rank, sources in enumerate(self.receive_from):
            for source in (rank, *sources):
                matrix[rank, source] = self.share(source)
        return matrix


def partners_of(graph: Graph, size: int, step: int, fragment: int = 0) -> Partners:
    """Return the checked exchange of ``graph`` for this step and fragment; a single rank has no peers.

    Raises:
        ValueError: If a rank is missing, sends to itself, twice to the same rank or to one that does not exist, or
            receives from no other.
    """

    def refuse(what: str) -> ValueError:
        return ValueError(f"{graph!r} at step {step}, fragment {fragment}, for {size} ranks: {what}")

    if size == 1:
        return Partners(((),), ((),))
    answer = graph.send_to(size, step, fragment)
    if len(answer) < size:
        raise refuse(f"rank {len(answer)} is missing")
    if len(answer) > size:
        raise refuse(f"rank {size} does not exist")
    send_to = tuple(tuple(map(operator.index, peers)) for peers in answer)
    receive_from: list[list[int]] = [[] for _ in range(size)]
    for rank, peers in enumerate(send_to):
        for peer in peers:
            if peer == rank:
                raise refuse(f"rank {rank} sends to itself, but it keeps a share anyway")
            if not 0 <= peer < size:
                raise refuse(f"rank {rank} sends to rank {peer}, which does not exist")
            if receive_from[peer][-1:] == [rank]:
                raise refuse(f"rank {rank} sends twice to rank {peer}")
            receive_from[peer].append(rank)
    for rank, sources in enumerate(receive_from):
        if not sources:
            raise refuse(f"rank {rank} receives from no rank")
    return Partners(send_to, tuple(map(tuple, receive_from)))

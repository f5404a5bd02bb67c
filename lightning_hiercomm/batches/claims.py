"""A batch sampler whose batches nodes claim from a common counter, so that fast nodes take more of an epoch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sized
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from lightning_hiercomm.batches.sampler import EpochOrder
from lightning_hiercomm.nodes.topology import Topology

_CLAIMS_KEPT = 1024
"""A node's claims that its ranks can still read; ranks of a node load at most a few batches ahead of each other."""

_CONNECT_TIMEOUT = timedelta(seconds=30)

_TIMEOUT = timedelta(minutes=5)
"""The longest wait for the store, or for the claim of the node's first rank, which loads at the same time."""


class Claims:
    """A counter in a store on rank 0's machine, from which nodes claim batches. The constructor is collective.

    Args:
        topology: The nodes.
        address: An address of rank 0's machine that all ranks reach.
    """

    def __init__(self, topology: Topology, address: str) -> None:
        self._topology = topology
        own, trouble, port = None, None, 0
        if topology.rank == 0:
            try:
                own = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=_CONNECT_TIMEOUT)
                port = own.port
            except RuntimeError as error:
                trouble = str(error).splitlines()[0]
        port, trouble = topology.world.all_gather_object((port, trouble))[0]
        if trouble is not None:
            raise RuntimeError(
                f"EverySeconds: rank 0 cannot open a store at {address} ({trouble}). Set MASTER_ADDR to an address of"
                " its machine that all nodes reach, or divide the data yourself: Trainer(use_distributed_sampler=False)"
            )
        if own is None:
            try:
                own = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_CONNECT_TIMEOUT)
            except RuntimeError as error:
                raise RuntimeError(
                    f"EverySeconds: rank {topology.rank} cannot reach rank 0's store at {address}:{port}"
                    f" ({str(error).splitlines()[0]}). Open the port, or divide the data yourself:"
                    " Trainer(use_distributed_sampler=False)"
                ) from error
        own.set_timeout(_TIMEOUT)
        self._store: TCPStore = own
        self._iterations = 0

    def begin(self) -> int:
        """Begin an iteration of a dataloader, which ranks do equally often; return its number."""
        self._iterations += 1
        return self._iterations

    def batch(self, iteration: int, index: int) -> int:
        """Return this rank's batch of a claim of its node, perhaps past the end of the epoch.

        The ranks of a node claim consecutive batches together. The first claim of an iteration is fixed: batch r is
        that of rank r, so that every node has a batch in every epoch.

        Args:
            iteration: The number of the iteration; equal on all ranks.
            index: The claim's number in the iteration of this node, from 0.
        """
        topology = self._topology
        if index == 0:
            return topology.rank
        place = f"{iteration}/{topology.node}"
        if topology.local_rank == 0:
            first = (
                topology.world_size + self._store.add(str(iteration), topology.ranks_on_node) - topology.ranks_on_node
            )
            if topology.ranks_on_node > 1:
                self._store.set(f"{place}/{index}", str(first))
                if index > _CLAIMS_KEPT:
                    self._store.delete_key(f"{place}/{index - _CLAIMS_KEPT}")
            return int(first)
        return int(self._store.get(f"{place}/{index}")) + topology.local_rank


class ClaimedBatchSampler(Sampler[list[Any]]):
    """Yields the batches of an epoch that this rank's node claims. It has no length.

    Batch k is ``order[k B : (k + 1) B]``. Nodes use every batch once, and claim one ahead of what they load. If a node
    claims past the end, its last ranks repeat the first batches, at most one less than it has ranks.

    Args:
        order: The order of the epoch; Lightning calls ``set_epoch`` of the attribute :attr:`sampler`.
        batch_size: Samples per batch and rank, B.
        drop_last: Whether to leave out a last batch that is shorter.
        claims: The common counter.
        topology: The nodes.
    """

    def __init__(self, order: EpochOrder, batch_size: int, drop_last: bool, claims: Claims, topology: Topology) -> None:
        self.sampler = order
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._claims = claims
        self._topology = topology
        self._began: int | None = None

    def go_to(self, epoch: int) -> bool:
        """Set the epoch; return whether an iteration has begun with the order of another one."""
        self.sampler.set_epoch(epoch)
        return self._began is not None and self._began != epoch

    def __iter__(self) -> Iterator[list[Any]]:
        self._began = self.sampler.epoch
        return self._batches(self._claims.begin())

    def _batches(self, iteration: int) -> Iterator[list[Any]]:
        order, size, local_rank = self.sampler.indices(), self.batch_size, self._topology.local_rank
        batches = len(order) // size if self.drop_last else -(-len(order) // size)
        if not batches:
            raise ValueError(f"EverySeconds: the dataset has {len(order)} samples, less than a batch of {size}")
        ahead: _Ahead | None = None
        for index in count():
            batch = self._claims.batch(iteration, 0) if ahead is None else ahead.wait()
            if index and batch - local_rank >= batches:
                return
            ahead = _Ahead(partial(self._claims.batch, iteration, index + 1))
            start = batch % batches * size
            yield list(order[start : start + size])


class _Ahead:
    """A claim in a thread, because the store may be far away, and training would wait for it at every batch."""

    def __init__(self, claim: Callable[[], int]) -> None:
        self._claim = claim
        self._batch = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="hiercomm-claim", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._batch = self._claim()
        except Exception as error:  # raised where the batch is needed
            self._error = error

    def wait(self) -> int:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._batch


def is_divided(loader: object) -> bool:
    """Return whether Lightning would divide the data of a train dataloader among all ranks."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not isinstance(getattr(loader.batch_sampler, "sampler", loader.sampler), DistributedSampler)
    )


def claimed_dataloader(loader: DataLoader[Any], claims: Claims, topology: Topology, seed: int) -> DataLoader[Any]:
    """Return a copy of a dataloader whose batches nodes claim.

    Args:
        loader: The user's dataloader of a map-style dataset.
        claims: The common counter.
        topology: The nodes.
        seed: The seed of the shuffle; the same on every rank.

    Raises:
        ValueError: If the loader makes its batches in a way that cannot be divided.
    """
    remedy = "or set Trainer(use_distributed_sampler=False) and give each node its own data"
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if loader.batch_sampler is None:
        raise ValueError(f"EverySeconds: nodes claim batches, but batch_size=None makes none: set batch_size, {remedy}")
    if type(loader.batch_sampler) is not BatchSampler or not isinstance(sampler, Sized):
        kind = type(sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler).__name__
        raise ValueError(
            f"EverySeconds: nodes cannot claim batches of a {kind}: use a sampler with a length and a"
            f" batch_size, {remedy}"
        )
    batches = ClaimedBatchSampler(
        EpochOrder(sampler, seed),  # type: ignore[arg-type]
        loader.batch_sampler.batch_size,
        loader.batch_sampler.drop_last,
        claims,
        topology,
    )
    claimed = copy.copy(loader)
    # DataLoader refuses to set these, because an iterator may use them; a copy has no iterator
    claimed.__dict__.update(batch_sampler=batches, batch_size=None, drop_last=False, _iterator=None)
    return claimed

"""The places that data loaders and the data module have in their data, as Lightning's checkpoints hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DistributedSampler

from lightning_hiercomm._lightning import require_attribute
from lightning_hiercomm._lightning.tree import fabric, pl


def lost_places(trainer: pl.Trainer, has_sidecars: bool, have_equal_data: bool) -> Iterator[str]:
    """Yield why ranks may continue elsewhere in their data, after a resume from a checkpoint that is saved now."""
    of_rank_0 = []
    loaders = list(filter(is_stateful, _train_loaders(trainer)))
    for loader in loaders:
        if any(map(_draws_again, _samplers(loader))) and not trainer.is_last_batch:
            yield (
                f"{type(loader).__name__} draws another order when this run resumes in mid-epoch, so some samples come"
                " twice and others not at all: its place holds no order under Lightning's distributed sampler. Give it"
                " sampler=DistributedSampler(dataset, num_replicas=..., rank=...) instead of shuffle=True."
            )
    if not all(have_equal_data and _counts_batches(loader) for loader in loaders):
        of_rank_0.append("a train dataloader")
    if trainer.datamodule is not None and pl.utilities.model_helpers.is_overridden(  # type: ignore[attr-defined]
        "state_dict",
        trainer.datamodule,  # type: ignore[attr-defined]
        pl.LightningDataModule,
    ):
        of_rank_0.append("the data module")
    if of_rank_0 and not has_sidecars and trainer.world_size > 1:
        yield (
            f"The checkpoint holds rank 0's state of {' and of '.join(of_rank_0)}: after a resume all ranks continue at"
            " rank 0's place in the data. Unless it is the place of all, use"
            " HierarchicalStrategy(checkpoint_replicas=True) to store every rank's."
        )


def _counts_batches(loader: object) -> bool:
    """Return whether a loader's place is a number of batches, which is equal on all ranks with equal data."""
    return any(isinstance(each, DistributedSampler) for each in _samplers(loader))


def _draws_again(sampler: object) -> bool:
    """Return whether Lightning wraps a random sampler that is not torch's, such as torchdata's for ``shuffle=True``.

    The wrapper has no state, and draws again after a resume.
    """
    if not isinstance(sampler, fabric.utilities.distributed.DistributedSamplerWrapper):
        return False
    require_attribute(sampler.dataset, "_sampler")
    return "Random" in type(sampler.dataset._sampler).__name__  # type: ignore[attr-defined]


def begin_stateful_loader(dataloader: object, epoch: int) -> None:
    """Set the epoch of a stateful loader's samplers before its iteration.

    Lightning does it later in a Trainer that resumes, but torchdata's loader reads the order when it starts.
    """
    if is_stateful(dataloader):
        set_epoch(dataloader, epoch)


def set_epoch(dataloader: object, epoch: int) -> None:
    """Set the epoch of a loader's samplers, which the order of samples depends on."""
    for sampler in _samplers(dataloader):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def drop_places(checkpoint: Mapping[str, Any]) -> None:
    """Remove the places of this rank's train dataloaders from a checkpoint."""
    checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)


def is_stateful(dataloader: object) -> bool:
    """Return whether Lightning saves and restores the state of a dataloader."""
    return isinstance(dataloader, fabric.utilities.types._Stateful)


def restores_module(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> bool:
    """Return whether the data module gets a state from a checkpoint."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    return datamodule is not None and bool(checkpoint.get(type(datamodule).__qualname__))


def _train_loaders(trainer: pl.Trainer) -> list[Any]:
    loop = trainer.fit_loop
    require_attribute(loop, "_combined_loader")
    combined: pl.utilities.combined_loader.CombinedLoader | None = loop._combined_loader
    return [] if combined is None else combined.flattened


def _samplers(loader: object) -> list[Any]:
    batches = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), getattr(batches, "sampler", None), batches]

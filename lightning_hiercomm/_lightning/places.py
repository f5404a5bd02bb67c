"""The places that data loaders and the data module have in their data, as Lightning's checkpoints hold them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_hiercomm._lightning import require_attribute
from lightning_hiercomm._lightning.tree import fabric, pl

_LOADERS = "a train dataloader"
_MODULE = "the data module"
# random numbers for workers, and folders of a host: they differ between ranks at the same place
_NO_PLACE = {"_base_seed", "_shared_seed", "cache_dir_path", "input_dir_path"}


def places_in_data(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of this rank's places in the data; empty where neither loaders nor the data module have one.

    All ranks have the same classes, so either all of them return something or none.
    """
    places = {}
    if any(map(is_stateful, _train_loaders(trainer))):
        loops = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        places[_LOADERS] = _digest(loops.get("combined_loader"))
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if datamodule is not None and pl.utilities.model_helpers.is_overridden(
        "state_dict", datamodule, pl.LightningDataModule
    ):
        places[_MODULE] = _digest(checkpoint.get(type(datamodule).__qualname__))
    return places


def draws_another_order(trainer: pl.Trainer) -> str | None:
    """Return the type of a stateful train dataloader that shuffles in an order that its state does not hold.

    Lightning wraps a sampler that is not torch's, such as torchdata's for ``shuffle=True``. The wrapper has no state,
    and draws again after a resume.
    """
    for loader in _train_loaders(trainer):
        for sampler in _samplers(loader):
            if is_stateful(loader) and isinstance(sampler, fabric.utilities.distributed.DistributedSamplerWrapper):
                require_attribute(sampler.dataset, "_sampler")
                wrapped = sampler.dataset._sampler  # type: ignore[attr-defined]
                if "Random" in type(wrapped).__name__:
                    return type(loader).__name__
    return None


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


def _digest(state: object) -> str:
    return hashlib.blake2b(_text(state).encode(), digest_size=16).hexdigest()


def _text(value: object) -> str:
    """Return a text that is equal for equal states, whatever the order of their keys."""
    if isinstance(value, Mapping):
        parts = sorted(f"{key!r}: {_text(part)}" for key, part in value.items() if key not in _NO_PLACE)
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Tensor) or type(value).__module__ == "numpy":
        return repr(value.tolist())  # type: ignore[attr-defined]
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))

"""Batches in proportion to the ranks' speeds."""

from lightning_hiercomm.batches.heterogeneous import HeterogeneousBatches

__all__ = ["HeterogeneousBatches"]

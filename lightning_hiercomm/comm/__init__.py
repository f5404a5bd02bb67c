"""Collectives of tensors between ranks, over torch, MPI, shared memory or threads."""

from lightning_hiercomm.comm.base import Communicator, Handle, finished
from lightning_hiercomm.comm.meter import Meter

__all__ = ["Communicator", "Handle", "Meter", "finished"]

"""Moves tensors between ranks; knows nothing of training."""

from lightning_hiercomm.comm.base import Communicator, Handle, finished
from lightning_hiercomm.comm.meter import Meter

__all__ = ["Communicator", "Handle", "Meter", "finished"]

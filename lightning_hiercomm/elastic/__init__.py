"""Nodes that leave and join a run: who is there, an agreement that happens whole or not at all, and healing."""

from lightning_hiercomm.elastic.configuration import Elastic

__all__ = ["Elastic"]

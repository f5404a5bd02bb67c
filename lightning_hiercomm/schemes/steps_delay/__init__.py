"""SSD-SGD: a server a node, pulled late; local updates in between."""

from lightning_hiercomm.schemes.steps_delay.scheme import StepsDelay

__all__ = ["StepsDelay"]

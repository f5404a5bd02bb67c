"""SSD-SGD: a sharded parameter server that is pulled every few steps, with local updates in between."""

from lightning_hiercomm.schemes.steps_delay.scheme import StepsDelay

__all__ = ["StepsDelay"]

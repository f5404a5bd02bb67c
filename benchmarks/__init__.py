"""Benchmarks over real slow networks, against real peers: ``python -m benchmarks --help``."""

"""Micro-benchmarks of one process: ``pytest benchmarks/micro``. The ordinary tests do not collect them."""

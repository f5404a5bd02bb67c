"""Checkpoints: plain ones, sidecars of every rank, and directories of shards."""

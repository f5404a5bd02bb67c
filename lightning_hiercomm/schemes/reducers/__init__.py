"""Reducers: how buckets are averaged between nodes, waited for or overlapped with training."""

"""The nodes of a run with their communicators, and one optimizer's tensors as flat buckets."""

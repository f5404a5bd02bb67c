"""Which rank lives on which node, and one optimizer's parameters as flat buckets."""

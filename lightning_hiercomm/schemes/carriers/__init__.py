"""Who carries a bucket between nodes, and what is in flight."""

"""Who carries a bucket between nodes, through which graph, and what is in flight."""

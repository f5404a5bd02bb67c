"""Check a cluster, measure it, predict schemes on it, and recommend one."""

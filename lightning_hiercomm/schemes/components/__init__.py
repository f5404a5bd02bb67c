"""Components of a parameter synchronization: schedules, merges and outer optimizers."""

"""One question each, answered in one process."""

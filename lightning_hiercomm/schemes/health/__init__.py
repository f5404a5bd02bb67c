"""Checks for non-finite values, ranks at unequal steps, and unequal replicas inside a node."""

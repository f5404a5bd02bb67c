"""Checks: values that are not finite, ranks at unequal steps, and replicas that should be equal."""

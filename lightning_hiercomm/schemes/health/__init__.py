"""Checks for non-finite values and ranks at unequal steps."""

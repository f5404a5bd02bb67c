"""Measurements: the doctor, the probe, and timed training steps."""

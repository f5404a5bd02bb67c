"""Train many replicas of a model on one machine."""

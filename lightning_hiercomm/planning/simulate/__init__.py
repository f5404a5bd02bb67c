"""What a scheme would do to a model: many replicas of a small task, on one machine."""

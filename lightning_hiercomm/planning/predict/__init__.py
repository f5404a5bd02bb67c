"""What a scheme would cost there: the cost model, its timeline, a recommendation."""

"""The cost model and the recommendation."""

"""Predictions before anything runs: plans, the fit in memory, and costs."""

"""Comparison of points and runs, and the explanation of a point."""

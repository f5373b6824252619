"""Comparisons of the models with published and recorded figures (`benchmarks.published`)."""

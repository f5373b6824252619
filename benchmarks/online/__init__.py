"""Tuning while training, on recorded live settings: `python -m benchmarks.online`."""

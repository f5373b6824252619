"""Benchmarks: each prints its figures, so that anyone can rerun what the project claims.

`python -m benchmarks.NAME [--json FILE]`; the last lines read `figure <name> <value> <unit>`.
"""

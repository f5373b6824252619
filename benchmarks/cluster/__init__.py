"""Figures of searches on a cluster; each module is one part (`python -m benchmarks.cluster`)."""

"""Executors: where and when probes run."""

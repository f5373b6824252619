"""Fakes and made-up tables shared by tests and benchmarks."""

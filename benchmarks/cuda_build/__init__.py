"""Ranks under torch's CUDA build, on a machine without a GPU."""

"""Searches over training scripts that other projects publish."""

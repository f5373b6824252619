"""Tuning of live settings while a training runs, within a promised slowdown."""

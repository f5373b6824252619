"""A run as one file for others, with names and secrets replaced where that is asked for."""

"""Faults caused for real: of the driver, its storage, the ranks, the GPUs and a Ray cluster."""

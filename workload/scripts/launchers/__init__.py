"""Launchers of pasted commands: what each would start, and the same command written back."""

from tuner.workload.scripts.launchers.launcher import Launcher
from tuner.workload.scripts.launchers.reading import kind_of, read_command, under_srun

__all__ = ["Launcher", "kind_of", "read_command", "under_srun"]

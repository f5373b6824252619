"""Launchers of pasted commands: what each would start, read by its own parser."""

from tuner.workload.scripts.launchers.launcher import Launcher
from tuner.workload.scripts.launchers.reading import read_command

__all__ = ["Launcher", "read_command"]

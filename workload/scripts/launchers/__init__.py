"""Launchers of pasted commands: what each would start, and the same command written back."""

# Each of these modules registers its launchers.
from tuner.workload.scripts.launchers import parsed, slurm, trainers  # noqa: F401
from tuner.workload.scripts.launchers.launcher import Launcher
from tuner.workload.scripts.launchers.reading import kind_of, read_command
from tuner.workload.scripts.launchers.slurm import is_srun

__all__ = ["Launcher", "is_srun", "kind_of", "read_command"]

"""Programs of the system that tests look for, by name."""

from tests.support.browser import BROWSERS

SLURM = ("munged", "slurmctld", "slurmd", "sbatch", "sinfo", "squeue", "scancel", "scontrol")
#: All that a machine may have at a place of its own.
PROGRAMS = (
    *("cc", "gcc", "clang", "g++", "ninja", "numactl", "buildah", "ip", "unshare", "initdb", "git"),
    *("make", "bash", "zsh", *BROWSERS, *SLURM),
    *("python3.11", "python3.12", "python3.13", "python3.14"),
)

"""Launchers of pasted commands and the processes of each."""

from tuner.workload.scripts.launchers.kinds import KINDS, UNREAD, kind_of, read_command
from tuner.workload.scripts.launchers.slurm import is_srun, with_tasks
from tuner.workload.scripts.script_facts import Launcher

#: Words of launchers, which say nothing of a user.
LAUNCHER_WORDS = frozenset(
    {
        *(name for kind in KINDS for name in (*kind.commands, *kind.modules)),
        *(*UNREAD, "env", "launch", "train"),
    }
)
__all__ = ["LAUNCHER_WORDS", "Launcher", "is_srun", "kind_of", "read_command", "with_tasks"]

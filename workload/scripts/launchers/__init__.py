"""Launchers of pasted commands and the processes of each."""

from tuner.workload.scripts.launchers.kinds import KINDS, UNREAD, kind_of, launched
from tuner.workload.scripts.launchers.slurm import with_tasks

#: Words of launchers, which say nothing of a user.
LAUNCHER_WORDS = frozenset(
    {
        *(name for kind in KINDS for name in (*kind.commands, *kind.modules)),
        *(*UNREAD, "env", "launch", "train"),
    }
)
__all__ = ["LAUNCHER_WORDS", "kind_of", "launched", "with_tasks"]

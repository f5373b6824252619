"""Reading of a pasted command: its launcher, and the words of the script that each rank runs.

Any command that is no launcher and that a package installs is its module (`console_scripts`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tuner.search_spaces.errors import InputError
from tuner.workload.scripts.launchers import slurm  # registers srun
from tuner.workload.scripts.launchers.console_scripts import as_module
from tuner.workload.scripts.launchers.kinds import (
    KINDS,
    Kind,
    Typed,
    assignments,
    without_python,
)
from tuner.workload.scripts.launchers.launcher import Launcher

#: Starters of ranks that are not read.
_UNREAD = ("mpirun", "mpiexec", "horovodrun", "jsrun", "aprun", "colossalai", "composer")
#: Words of launchers, which say nothing of a user.
LAUNCHER_WORDS = frozenset(
    {
        *(name for kind in KINDS for name in (*kind.commands, *kind.modules)),
        *(*_UNREAD, "env", "launch", "train"),
    }
)


def read_command(words: Sequence[str], cwd: Path) -> tuple[tuple[str, ...], Launcher | None]:
    """Return the words that each rank runs, without the interpreter, and the launcher if any.

    Raises:
        InputError: the launcher refuses the command, or it cannot be honoured.
    """
    assigned, rest = assignments(words)
    if "CUDA_VISIBLE_DEVICES" in assigned:
        raise InputError(
            "CUDA_VISIBLE_DEVICES goes before tuner, whose meter must see the same GPUs: "
            f"CUDA_VISIBLE_DEVICES={assigned['CUDA_VISIBLE_DEVICES']} tuner ..."
        )
    script, launcher = _read(rest, cwd, {**os.environ, **assigned})
    if launcher is None:
        if not assigned:
            return script, None
        launcher = Launcher("", (), script)
    return script, replace(launcher, env={**assigned, **launcher.env}, assigned=assigned)


def kind_of(launcher: Launcher) -> Kind | None:
    """Return what starts a launcher's ranks and writes it back; None for variables alone."""
    named = [kind for kind in KINDS if kind.name == launcher.kind]
    by_module = [kind for kind in named if {*kind.modules} & {*launcher.words}]
    return next(iter([*by_module, *named]), None)


def under_srun(words: Sequence[str]) -> bool:
    """Return True if a command begins with srun."""
    return slurm.is_srun(words)


def _read(
    words: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> tuple[tuple[str, ...], Launcher | None]:
    bare = without_python(words)
    name = Path(bare[0]).name if bare else ""
    if name in _UNREAD:
        raise InputError(
            f"{name} starts ranks itself, which is joulefront's part here; give the script and its "
            'own arguments alone, e.g. --script "train.py --data DIR"'
        )
    skip = len(words) - len(bare) + 1
    for kind in KINDS:
        if name == "-m" and bare[1:2] and bare[1] in kind.modules:
            skip += 1
        elif name not in kind.commands:
            continue
        elif kind.own and name == kind.commands[0]:
            if bare[1 : 1 + len(kind.own)] != kind.own:
                shown = " ".join((name, *kind.own))
                raise InputError(f"of {name}'s commands only `{shown}` trains")
            skip += len(kind.own)
        again = lambda words, environment: _read(words, cwd, environment)  # noqa: E731
        return kind.read(Typed(tuple(words), skip, cwd, environment, again))
    return (as_module(bare, cwd) if len(bare) == len(words) else bare), None

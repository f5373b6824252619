"""Reading of a pasted command: its launcher, and the words of the script that each rank runs.

Any other command that a package installs is its module: `litgpt pretrain` is started as
`python -m litgpt pretrain`. Nothing is imported: that the module starts the same function under
`python -m` is read from its source.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tuner.search_spaces.errors import InputError
from tuner.workload.scripts.launchers.kinds import (
    KINDS,
    Kind,
    Typed,
    assignments,
    without_python,
)
from tuner.workload.scripts.launchers.launcher import Launcher

_GUARD = re.compile(r"""__name__\s*==\s*["']__main__["']""")
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
    """Return the words that each rank runs, without the interpreter, and the launcher if any."""
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
    return next((kind for kind in KINDS if kind.name == launcher.kind), None)


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
    if bare[:2] == ("-m", "torch.distributed.launch"):
        raise InputError("torch.distributed.launch is deprecated; write torchrun in its place")
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
    return (_as_module(bare, cwd) if len(bare) == len(words) else bare), None


def _as_module(words: Sequence[str], cwd: Path) -> tuple[str, ...]:
    name = words[0] if words else ""
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("-") or (cwd / name).is_file():
        return tuple(words)
    (*_, entry) = (None, *importlib.metadata.entry_points(group="console_scripts", name=name))
    if entry is None:
        return tuple(words)
    module = entry.module.removesuffix(".__main__")
    if not _starts(entry, module):
        raise InputError(
            f"{name} calls {entry.value}, which python -m {module} does not; write a script that "
            "calls it"
        )
    return ("-m", module, *words[1:])


def _starts(entry: importlib.metadata.EntryPoint, module: str) -> bool:
    if entry.dist is None or module != entry.module:
        return True
    at = Path(*module.split("."))
    package = Path(str(entry.dist.locate_file(at)))
    if (package / "__init__.py").is_file():
        return (package / "__main__.py").is_file()
    try:
        return bool(_GUARD.search(package.with_suffix(".py").read_text("utf-8", "replace")))
    except OSError:
        return True

"""Commands that a package installs: `litgpt pretrain` is started as `python -m litgpt pretrain`.

The name is looked up among the entry points of the installed distributions. Nothing is imported:
that the module starts the same function under `python -m` is read from its source.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from pathlib import Path

from tuner.search_spaces.errors import InputError

_GUARD = re.compile(r"""__name__\s*==\s*["']__main__["']""")


def as_module(words: Sequence[str], cwd: Path) -> tuple[str, ...]:
    """Return a command whose first word is an installed one as `-m MODULE ...`, others as they are.

    Args:
        cwd: the folder that it is started in; a file of that name there is a script.

    Raises:
        InputError: `python -m` does not start what the command starts.
    """
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
    """Return True if `python -m` starts a module, or its source is not where it is installed."""
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

"""The framework of a command, among the shipped drivers and the user's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tuner.workload.scripts.frameworks.driven import Bound
from tuner.workload.scripts.frameworks.driver import (
    Driver,
    check_version,
    load_drivers,
    shipped_drivers,
)
from tuner.workload.scripts.frameworks.keys import check_keys, search_path
from tuner.workload.scripts.frameworks.parts import Recognised
from tuner.workload.scripts.frameworks.wrapper import read_function


def recognised(
    words: Sequence[str], cwd: Path, launcher: str = "", given: Path | None = None
) -> Bound | None:
    """Return the framework of a command, with the keys that its installed version lacks."""
    drivers = load_drivers(given) if given else _matching(words, cwd, launcher)
    path = search_path(cwd, words)
    checked = [(driver, check_keys(driver, path)) for driver in drivers]
    fitting = [
        (driver, found)
        for driver, found in checked
        if not driver.versions or not found.version or check_version(driver.versions, found.version)
    ]
    if not fitting:
        return None
    # Without a version the keys decide.
    driver, found = min(fitting, key=lambda pair: len(pair[1].gone))
    held: dict[str, Any] = {}
    if driver.wrapper is not None:
        told = [key for key in driver.program.values() if isinstance(key, str)]
        keys = [*driver.keys, *driver.facts.values(), *told]
        held = read_function(driver.wrapper, words, keys, path, cwd)
    return Bound(driver, found.version, found.gone, held)


def _matching(words: Sequence[str], cwd: Path, launcher: str) -> list[Driver]:
    # By the program, else by its imports, else by its launcher.
    text = _source(words, cwd)
    imported = set(re.findall(r"^\s*(?:import|from)\s+([\w.]+)", text, re.M))
    module = words[1] if words[0] == "-m" else ""
    path = f"/{module.replace('.', '/')}.py" if module else str((cwd / words[0]).resolve())
    ways: tuple[Callable[[Recognised], bool], ...] = (
        lambda signs: (
            any(fnmatch(path, pattern) for pattern in signs.scripts)
            or _below(module, signs.modules)
        ),
        lambda signs: any(_below(name, signs.imports) for name in imported),
        lambda signs: launcher in signs.launchers,
    )
    given = {word.partition("=")[0] for word in words}
    for way in ways:
        found = [
            driver
            for driver in shipped_drivers()
            if way(signs := driver.recognised)
            and (not signs.options or given & {*signs.options})
            and all(any(word in text for word in each.split("|")) for each in signs.mentions)
        ]
        if found:
            most = max(len(driver.recognised.mentions) for driver in found)
            return [driver for driver in found if len(driver.recognised.mentions) == most]
    return []


def _below(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _source(words: Sequence[str], cwd: Path) -> str:
    paths = [cwd / words[0]]
    if words[0] == "-m":
        module = Path(*words[1].split("."))
        paths = [folder / module.with_suffix(".py") for folder in search_path(cwd, words)]
        paths += [folder / module / "__main__.py" for folder in search_path(cwd, words)]
    for path in paths:
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                return ""
    return ""

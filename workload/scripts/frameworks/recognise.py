"""The framework of a command, among the shipped drivers and the user's own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tuner.workload.scripts.frameworks.driven import Bound
from tuner.workload.scripts.frameworks.driver import (
    Driver,
    check_version,
    load_driver,
    shipped_drivers,
)
from tuner.workload.scripts.frameworks.keys import check_keys, search_path
from tuner.workload.scripts.frameworks.wrapper import read_function


def recognised(
    words: Sequence[str], cwd: Path, launcher: str = "", given: Path | None = None
) -> Bound | None:
    """Return the framework of a command, with the keys that its installed version lacks."""
    drivers = [load_driver(given)] if given else _matching(words, cwd, launcher)
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
    """Return the drivers that match by the program, else by its imports, else by its launcher."""
    text = _source(words, cwd)
    ways = (_by_program, _by_imports, _by_launcher)
    for way in ways:
        found = [d for d in shipped_drivers() if way(d, words, launcher, text, cwd)]
        found = [d for d in found if _has_the_rest(d, words, text)]
        if found:
            most = max(len(driver.recognised.mentions) for driver in found)
            return [driver for driver in found if len(driver.recognised.mentions) == most]
    return []


def _has_the_rest(driver: Driver, words: Sequence[str], text: str) -> bool:
    signs, given = driver.recognised, {word.partition("=")[0] for word in words}
    named = not signs.options or any(option in given for option in signs.options)
    return named and all(
        any(word in text for word in either.split("|")) for either in signs.mentions
    )


def _by_program(driver: Driver, words: Sequence[str], launcher: str, text: str, cwd: Path) -> bool:
    signs = driver.recognised
    if words[0] == "-m":
        name = words[1]
        if any(name == module or name.startswith(f"{module}.") for module in signs.modules):
            return True
        return any(fnmatch(f"/{name.replace('.', '/')}.py", pattern) for pattern in signs.scripts)
    path = str((cwd / words[0]).resolve())
    return any(fnmatch(path, pattern) for pattern in signs.scripts)


def _by_launcher(driver: Driver, words: Sequence[str], launcher: str, text: str, cwd: Path) -> bool:
    return bool(launcher) and launcher in driver.recognised.launchers


def _by_imports(driver: Driver, words: Sequence[str], launcher: str, text: str, cwd: Path) -> bool:
    imported = set(re.findall(r"^\s*(?:import|from)\s+([\w.]+)", text, re.M))
    wanted = driver.recognised.imports
    return any(n == m or n.startswith(f"{m}.") for n in imported for m in wanted)


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

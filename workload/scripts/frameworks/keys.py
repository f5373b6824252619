"""The framework of a command, and the keys that its installed version has, from its sources.

Nothing is imported: the files are read as text.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.scripts.command import search_path, source_of
from tuner.workload.scripts.frameworks.bound_driver import Bound
from tuner.workload.scripts.frameworks.driver import (
    Driver,
    check_version,
    load_drivers,
    shipped_drivers,
)
from tuner.workload.scripts.frameworks.settings import FrameworkSigns, Settings, read_function
from tuner.workload.scripts.key_files import parsed_file

#: Limits of what one pattern of a driver has read; the largest sources have some hundred KiB.
_MOST_FILES, _MOST_BYTES = 200, 4 * 2**20


@dataclass(frozen=True)
class KeyCheck:
    """Result of the comparison of a driver's keys with a framework's sources."""

    version: str = ""
    found: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    former: Mapping[str, str] = field(default_factory=dict, hash=False)
    files: tuple[Path, ...] = ()


def check_keys(driver: Driver, path: Sequence[Path]) -> KeyCheck:
    """Compare a driver's keys with the framework that a path leads to, by the words of its files.

    A key that no file names is gone; one that it names may still be of another table.
    """
    named = [_files(pattern, path) for pattern in driver.sources]
    files = [file for found in named for file in found]
    folders = [str(folder) for folder in path]
    installed = importlib.metadata.distributions(name=driver.package, path=folders)
    version = next((found.version for found in installed), "") if driver.package else ""
    words = frozenset[str]().union(*map(_words, files))
    former = _former(driver, version, words)
    if not files:
        return KeyCheck(version, former=former)
    found = tuple(key for key in driver.keys if key in former or _stands(key, words))
    # What a file that is not installed may declare is not gone.
    gone = tuple(key for key in driver.keys if key not in found) if all(named) else ()
    return KeyCheck(version, found, gone, former, tuple(files))


def _former(driver: Driver, version: str, words: frozenset[str]) -> dict[str, str]:
    """Return the earlier names by which a release takes keys: by its number, or its sources."""
    former = {}
    for row in driver.renamed:
        standing = (name for name in row.was if _stands(name, words))
        if version and row.since and check_version(f"<{row.since}", version):
            former[row.key] = next(standing, row.was[0])
        elif words and not _stands(row.key, words) and (name := next(standing, "")):
            former[row.key] = name
    return former


def best_fit(drivers: Sequence[Driver], path: Sequence[Path]) -> tuple[Driver, KeyCheck]:
    """Return the driver with the fewest keys that the installed framework lacks."""
    checked = [(driver, check_keys(driver, path)) for driver in drivers]
    return min(checked, key=lambda pair: len(pair[1].gone))


def _files(pattern: str, path: Sequence[Path]) -> list[Path]:
    parts = Path(pattern).parts
    if Path(*parts).is_absolute() or ".." in parts or "**" in parts:
        raise InputError(
            f"{pattern!r} names files beyond the import path, or needs too long a search; "
            "write it from a folder of the path, without .. and **"
        )
    for folder in path:
        try:
            every = (file for file in folder.glob(pattern) if file.is_file())
            found = sorted(islice(every, _MOST_FILES + 1))
        except (OSError, ValueError):
            continue
        if len(found) > _MOST_FILES or any(f.stat().st_size > _MOST_BYTES for f in found):
            raise InputError(
                f"{pattern!r} names more than {_MOST_FILES} files, or one of more than "
                f"{_MOST_BYTES // 2**20} MiB, in {folder}; name those that declare the keys"
            )
        if found:
            return found
    return []


@lru_cache(maxsize=64)
def _words(path: Path) -> frozenset[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    return frozenset(re.findall(r"[A-Za-z]\w*", f"{text} {text.replace('-', '_')}"))


def _stands(key: str, words: frozenset[str]) -> bool:
    name = key.removeprefix("env:").rpartition(".")[2].lstrip("-").replace("-", "_")
    # Names of variables are put together of a prefix and the rest.
    parts = ((name[: at + 1], name[at + 1 :]) for at, letter in enumerate(name) if letter == "_")
    return name in words or any(words.issuperset(both) for both in parts)


def recognised(
    words: Sequence[str],
    cwd: Path,
    launcher: str = "",
    given: Path | None = None,
    *,
    calls: bool = True,
) -> Bound | None:
    """Return the framework of a command, with the keys that its installed version lacks.

    With `calls`, a user's function that makes the configuration is called, too.
    """
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
    if driver.wrapper is not None and calls:
        key_names = [key for key in driver.program.values() if isinstance(key, str)]
        keys = [*driver.keys, *driver.read_keys, *key_names]
        held = read_function(driver.wrapper, words, keys, path, cwd)
    return Bound(driver, found.version, found.gone, held, found.former)


def _matching(words: Sequence[str], cwd: Path, launcher: str) -> list[Driver]:
    # By the program, else by its imports, else by its launcher.
    text = source_of(words, cwd)
    imported = set(re.findall(r"^\s*(?:import|from)\s+([\w.]+)", text, re.M))
    module = words[1] if words[0] == "-m" else ""
    path = f"/{module.replace('.', '/')}.py" if module else str((cwd / words[0]).resolve())
    ways: tuple[Callable[[FrameworkSigns], bool], ...] = (
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
            found = [driver for driver in found if len(driver.recognised.mentions) == most]
            by_file = [driver for driver in found if _reads_file(driver, words, cwd)]
            return by_file or found
    return []


def _reads_file(driver: Driver, words: Sequence[str], cwd: Path) -> bool:
    """Return True if the command's file has the keys by which a driver recognises one."""
    file = Settings(driver.command, tuple(words), cwd, {}).file
    try:
        return file is not None and driver.recognised.in_file(parsed_file(file[1]))
    except InputError:  # it is missing, or not of this format
        return False


def _below(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)

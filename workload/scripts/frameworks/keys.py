"""The framework of a command, and the keys that its installed version has, from its sources.

Nothing is imported: the files are parsed as text. Fields of dataclasses and pydantic models,
options of argparse, parameters of functions and texts are collected; what is made while the program
runs is not seen.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.scripts.frameworks.driven import Bound
from tuner.workload.scripts.frameworks.driver import (
    Driver,
    check_version,
    load_drivers,
    shipped_drivers,
)
from tuner.workload.scripts.frameworks.parts import Recognised, Source
from tuner.workload.scripts.frameworks.settings import read_function

#: Limits of what one pattern of a driver has read; the largest sources have some hundred KiB.
_MOST_FILES, _MOST_BYTES = 200, 4 * 2**20


@dataclass(frozen=True)
class Checked:
    """Result of the comparison of a driver's keys with a framework's sources."""

    version: str = ""
    found: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()


def search_path(cwd: Path, words: Sequence[str]) -> tuple[Path, ...]:
    """Return the folders from which a script imports: its own, the current one, Python's."""
    own = [] if not words or words[0] == "-m" else [(cwd / words[0]).resolve().parent]
    folders = [*own, cwd, *(Path(entry) for entry in sys.path if entry)]
    return tuple(dict.fromkeys(folders))


def check_keys(driver: Driver, path: Sequence[Path]) -> Checked:
    """Compare a driver's keys with the framework that a path leads to."""
    declared: set[str] = set()
    files: list[Path] = []
    own = tuple(f"{source.below}." for source in driver.sources if source.kind == "own")
    missing = False
    for source in driver.sources:
        found_here = _files(source, path)
        missing |= not found_here and source.kind != "own"
        files += found_here
        for file in found_here:
            declared |= _declared(file, source)
    folders = [str(folder) for folder in path]
    installed = importlib.metadata.distributions(name=driver.package, path=folders)
    version = next((found.version for found in installed), "") if driver.package else ""
    if not files:
        return Checked(version)
    known = {_plain(key) for key in declared}
    keys = [key for key in driver.keys if not (own and key.startswith(own))]
    found = tuple(key for key in keys if _plain(key) in known)
    # What a source that is not installed may declare is not gone.
    gone = () if missing else tuple(key for key in keys if key not in found)
    return Checked(version, found, gone, tuple(files))


def best_fit(drivers: Sequence[Driver], path: Sequence[Path]) -> tuple[Driver, Checked]:
    """Return the driver with the fewest keys that the installed framework lacks."""
    checked = [(driver, check_keys(driver, path)) for driver in drivers]
    return min(checked, key=lambda pair: len(pair[1].gone))


def _files(source: Source, path: Sequence[Path]) -> list[Path]:
    parts = Path(source.file or "").parts
    if Path(*parts).is_absolute() or ".." in parts or "**" in parts:
        raise InputError(
            f"{source.file!r} names files beyond the import path, or needs too long a search; "
            "write it from a folder of the path, without .. and **"
        )
    for folder in path if source.file else ():
        try:
            every = (file for file in folder.glob(source.file) if file.is_file())
            found = sorted(islice(every, _MOST_FILES + 1))
        except (OSError, ValueError):
            continue
        if len(found) > _MOST_FILES or any(f.stat().st_size > _MOST_BYTES for f in found):
            raise InputError(
                f"{source.file!r} names more than {_MOST_FILES} files, or one of more than "
                f"{_MOST_BYTES // 2**20} MiB, in {folder}; name those that declare the keys"
            )
        if found:
            return found
    return []


def _plain(key: str) -> str:
    return key.removeprefix("env:").lstrip("-").replace("-", "_")


@lru_cache(maxsize=64)
def _tree(path: Path) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _declared(path: Path, source: Source) -> set[str]:
    tree = _tree(path)
    if source.kind == "texts":
        held = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        texts = {text for text in held if isinstance(text, str)}
        # Names of variables are put together of a prefix and the rest.
        ahead = [text for text in texts if re.fullmatch(r"[A-Z][A-Z_]+_", text)]
        rest = [text for text in texts if re.fullmatch(r"[A-Z][A-Z_0-9]+", text)]
        texts |= {first + last for first in ahead for last in rest}
        return {f"{source.below}.{text}" if source.below else text for text in texts}
    if source.kind == "parameters":
        made = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        chosen = [node.args for node in made if source.name in ("", node.name)]
        return {arg.arg for args in chosen for arg in (*args.args, *args.kwonlyargs)}
    every = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    classes = {node.name: node for node in every}
    if source.kind == "options":
        fields = {name for node in every for name, _ in _fields(node)}
        return fields | set(_options(tree))
    below = f"{source.below}." if source.below else ""
    if source.name:
        names = _nested(classes, source.name, ()) if source.name in classes else iter(())
    else:
        names = (name for node in every for name, _ in _fields(node))
    named = {below + name for name in names}
    # A module that assigns its settings at the top, as a script with globals does.
    return named | ({below + name for name, _ in _fields(tree)} if not source.name else set())


def _fields(node: ast.ClassDef | ast.Module) -> Iterator[tuple[str, str]]:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id, ast.unparse(item.annotation)
        elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            yield item.targets[0].id, ""
        elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
            yield from ((arg.arg, "") for arg in [*item.args.args, *item.args.kwonlyargs])


def _nested(classes: dict[str, ast.ClassDef], name: str, above: tuple[str, ...]) -> Iterator[str]:
    if name in above:
        return
    node = classes[name]
    for base in node.bases:
        own = ast.unparse(base).rpartition(".")[2]
        if own in classes:
            yield from _nested(classes, own, (*above, name))
    for field, annotation in _fields(node):
        yield field
        inner = [part for part in re.findall(r"\w+", annotation) if part in classes]
        for part in inner:
            yield from (f"{field}.{below}" for below in _nested(classes, part, (*above, name)))


def _options(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if not isinstance(called, ast.Attribute) or called.attr not in ("add_argument", "option"):
            continue
        assert isinstance(node, ast.Call)
        for argument in node.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value


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
    text = source_of(words, cwd)
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


def source_of(words: Sequence[str], cwd: Path) -> str:
    """Return the text of the script or module of a command; "" if it cannot be read."""
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

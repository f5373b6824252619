"""Keys of a framework in a command, in the file that it names, and in the environment.

A key is read from the command first, then from the file. It is written where it stands; a new one
goes into the file if there is one, else at the end of the command. Variables are keys "env:NAME".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tuner.search_spaces.declared import FILE_KINDS
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import write_text
from tuner.workload.key_files import changed_text, parsed_file, read_text
from tuner.workload.scripts.frameworks.parts import UNSET, Command


@dataclass(frozen=True)
class Settings:
    """Keys as a command gives them."""

    command: Command
    words: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str]
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> tuple[int, Path] | None:
        """Position of the word that names the file with the keys, and the file; None without."""
        for option in self.command.file:
            for at, word in enumerate(self.words):
                name, equals, value = word.partition("=")
                if option == "first":
                    value_of = at > 0 and _is_option(self.words[at - 1])
                    value_of = (
                        value_of and self.words[at - 1] != "-m" and "=" not in self.words[at - 1]
                    )
                    found = at if word.endswith(FILE_KINDS) and not value_of else None
                    found = None if _is_option(word) else found
                elif _same(name, option):
                    found = at if equals else at + 1
                else:
                    continue
                if found is None or found >= len(self.words):
                    continue
                path = self.cwd / (value if option != "first" and equals else self.words[found])
                if path.suffix in FILE_KINDS and path.is_file():
                    return found, path
        return None

    def get(self, key: str) -> Any:
        """Return the value of a key, or None; InputError if the file cannot be read."""
        kind, _, name = key.rpartition(":")
        if kind == "env":
            value = self.env.get(name)
            return None if value is None else _native(value)
        at = self._at(key)
        if at is not None:
            return self._word(at)[1]
        file = self.file
        data: Any = parsed_file(file[1]) if file else None
        if self.command.python:
            return self._assigned.get(key)
        for part in key.split("."):
            if not isinstance(data, Mapping) or part not in data:
                return self.given.get(key)
            data = data[part]
        return data

    @cached_property
    def _assigned(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for word in self.words:
            path = self.cwd / word
            if path.suffix != ".py" or not path.is_file():
                continue
            try:
                tree = ast.parse(read_text(path))
            except (SyntaxError, ValueError) as error:
                raise InputError(f"cannot read {path}: {error}") from error
            for node in tree.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    value = _constant(node.value)
                    if value is not None:
                        values[node.targets[0].id] = value
        return values

    def names(self, key: str) -> bool:
        """Return True if the command itself gives a key."""
        return self._at(key) is not None

    def _at(self, key: str) -> int | None:
        if not self.command.option:
            return None
        prefix = self.command.option.partition("{key}")[0]
        tables, dot, last = key.rpartition(".")
        negated = f"{prefix}{tables}{dot}no-{last}" if self.command.truth == "negated" else ""
        found = None
        for at, word in enumerate(self.words):
            name, equals, _ = word.partition("=")
            if not prefix and not equals:
                continue  # an override is KEY=VALUE in one word
            if _same(name, prefix + key) or (negated and _same(name, negated)):
                found = at
        return found

    def _word(self, at: int) -> tuple[int, Any]:
        name, equals, value = self.words[at].partition("=")
        if equals:
            return 1, _native(value)
        if self.command.truth == "negated" and re.search(r"[.-]no-[\w-]+$", name):
            return 1, False
        following = self.words[at + 1 : at + 2]
        if not following or _is_option(following[0]):
            return 1, True
        return 2, _native(following[0])

    def changed(
        self, changes: Mapping[str, Any], folder: Path
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """Write the file with other values to a folder; return the command and more variables.

        The value `UNSET` takes a key away. InputError if a key can be given nowhere, or the file
        cannot be changed; OSError if it cannot be written.
        """
        words, env, in_file = list(self.words), {}, {}
        file = self.file
        for key, value in changes.items():
            kind, _, name = key.rpartition(":")
            if kind == "env":
                env[name] = "" if value == UNSET else str(value).lower()
                continue
            now = Settings(self.command, tuple(words), self.cwd, self.env)
            at = now._at(key)
            if at is not None:
                count = now._word(at)[0]
                words[at : at + count] = self._spelled(key, value, words[at])
            elif file is not None:
                if value != UNSET or self.get(key) is not None:
                    in_file[key] = None if value == UNSET else value
            elif self.command.option:
                words += self._spelled(key, value)
            elif value != UNSET:
                raise InputError(f"{key} is a key of a file, and the command names none")
        if in_file and file is not None:
            folder.mkdir(parents=True, exist_ok=True)
            written = folder.resolve() / file[1].name
            write_text(written, changed_text(file[1], in_file, may_add=True))
            for at, word in enumerate(words):
                before, equals, value = word.rpartition("=")
                if word.endswith(FILE_KINDS) and (self.cwd / value).resolve() == file[1].resolve():
                    words[at] = f"{before}{equals}{written}"
        return tuple(words), env

    def _spelled(self, key: str, value: Any, today: str = "") -> list[str]:
        option, truth = self.command.option, self.command.truth
        name = today.partition("=")[0]
        if name:
            option = name + ("={value}" if "=" in today else " {value}")
        if value == UNSET or (value is False and truth == "bare"):
            return []
        if value is True and truth in ("bare", "negated"):
            return [self.command.option.partition("{key}")[0] + key]
        if value is False and truth == "negated":
            tables, dot, last = key.rpartition(".")
            return [f"{self.command.option.partition('{key}')[0]}{tables}{dot}no-{last}"]
        if " {value}" in option:
            return [option.replace(" {value}", "").replace("{key}", key), str(value)]
        return [option.replace("{key}", key).replace("{value}", str(value))]


def _constant(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _constant(node.left), _constant(node.right)
        return left * right if type(left) is int and type(right) is int else None
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str):
        return node.value
    return None


def _same(name: str, other: str) -> bool:
    # Return True if two options are one: most parsers take - and _ for the same.
    return name.replace("_", "-") == other.replace("_", "-")


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-[\d.]+(e-?\d+)?", word)


def _native(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

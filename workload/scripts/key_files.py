"""Copies of JSON, YAML and TOML files in which single keys have other values."""

from __future__ import annotations

import contextlib
import io
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knob_declarations import FILE_KINDS

#: No configuration of a training is larger; a larger file is not read.
_MOST_BYTES = 4 * 2**20


def read_key(path: Path, key: str) -> Any:
    """Return the value of a key (names with dots); InputError if there is no single value."""
    return value_at(_parsed(read_text(path), path), key, path.name)


def value_at(data: Any, key: str, file: str) -> Any:
    """Return the value of a key in the data of a file; InputError as `read_key`."""
    for name in key.split("."):
        if not isinstance(data, Mapping) or name not in data:
            raise InputError(
                f"{file} has no key {key}; add it there with the value that you use today"
            )
        data = data[name]
    if not isinstance(data, bool | int | float | str):
        raise InputError(f"{key} of {file} is not a number, a text or a truth value")
    return data


def parsed_file(path: Path) -> Any:
    """Return the data of a JSON, YAML or TOML file; InputError if it cannot be read."""
    return _parsed(read_text(path), path)


def repeated_keys(path: Path) -> list[tuple[str, str]]:
    """Return the keys that a YAML or JSON file gives twice in one table, each with its last value.

    Parsers take the last in silence.
    """
    try:
        node = yaml.compose(read_text(path), Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return []
    if not isinstance(node, yaml.MappingNode):
        return []
    last: dict[str, str] = {}
    twice: list[str] = []
    for key, value in node.value:
        name = str(key.value)
        if name in last:
            twice.append(name)
        last[name] = str(value.value) if isinstance(value, yaml.ScalarNode) else "a table"
    return [(name, last[name]) for name in dict.fromkeys(twice)]


def changed_text(path: Path, changes: Mapping[str, Any], *, may_add: bool = False) -> str:
    """Return the text of a file with other values of some keys; comments and order stay.

    With `may_add`, keys that the file lacks are added and those whose value is None taken away.
    InputError as `read_key`.
    """
    text = read_text(path)
    before = _parsed(text, path)
    try:
        expected = _unshared(before)
    except RecursionError as error:
        raise InputError(f"{path.name} holds itself") from error
    for key, value in changes.items():
        if not may_add:
            read_key(path, key)
        _set(expected, path, key, value)
    if expected == before:
        return text
    if path.suffix == ".json":
        return json.dumps(expected, indent=2) + "\n"
    edit = _edited_toml if path.suffix == ".toml" else _edited_yaml
    # Comments are lost where the editor refuses the file (a key twice) or changes another key, too
    # (one that an alias shares).
    with contextlib.suppress(Exception):
        made = edit(text, path, changes)
        if _parsed(made, path) == expected:
            return made
    if path.suffix == ".toml":
        import tomlkit

        return tomlkit.dumps(expected)
    return str(yaml.safe_dump(expected, sort_keys=False, allow_unicode=True))


def _edited_toml(text: str, path: Path, changes: Mapping[str, Any]) -> str:
    import tomlkit

    document = tomlkit.parse(text)
    for key, value in changes.items():
        _set(document, path, key, value)
    return tomlkit.dumps(document)


def _edited_yaml(text: str, path: Path, changes: Mapping[str, Any]) -> str:
    from ruamel.yaml import YAML

    editor = YAML()
    editor.preserve_quotes = True
    editor.width = 2**20  # a long line stays one
    document = editor.load(text)
    for key, value in changes.items():
        # As PyYAML writes it, by which frameworks read YAML 1.1: 'no' and 1.0e-05.
        written = None if value is None else editor.load(yaml.safe_dump(value))
        _set(document, path, key, written)
    made = io.StringIO()
    editor.dump(document, made)
    return made.getvalue()


def _unshared(data: Any) -> Any:
    # A copy without the tables that aliases share.
    if isinstance(data, dict):
        return {key: _unshared(value) for key, value in data.items()}
    return [_unshared(value) for value in data] if isinstance(data, list) else data


def _set(table: Any, path: Path, key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for name in tables:
        if isinstance(table, dict) and table.get(name) is None:
            table[name] = {}
        table = table[name] if isinstance(table, dict) else None
    if not isinstance(table, dict):
        raise InputError(f"{path.name} cannot have the key {key}")
    if value is None:
        table.pop(last, None)
    else:
        table[last] = value


def renamed(words: Sequence[str], cwd: Path, file: Path, written: Path) -> list[str]:
    """Return a command in which `written` stands wherever it names `file`."""
    made = list(words)
    for at, word in enumerate(words):
        before, equals, value = word.rpartition("=")
        if word.endswith(FILE_KINDS) and (cwd / value).resolve() == file.resolve():
            made[at] = f"{before}{equals}{written}"
    return made


def read_text(path: Path) -> str:
    """Return the text of a file; InputError if it cannot be read, or is not a configuration's."""
    try:
        if not path.is_file():
            raise InputError(f"{path} is not a file (standard input cannot be read twice)")
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{path} is too large for a configuration")
        return path.read_text(encoding="utf-8-sig")  # editors of Windows begin it with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def _parsed(text: str, path: Path) -> Any:
    try:
        if path.suffix == ".json":
            return json.loads(text)
        if path.suffix == ".toml":
            return tomllib.loads(text)
        return yaml.safe_load(text)
    except Exception as error:  # PyYAML's errors share no class with those of the others
        problem = " ".join(str(error).split())
        kind = path.suffix[1:].upper() if path.suffix in (".json", ".toml") else "YAML"
        raise InputError(f"{path} is not valid {kind}: {problem}") from error

"""Change of single keys in a JSON, YAML or TOML file, with everything else left as it is.

In YAML and TOML the text of the one value is replaced, so comments, order and spelling stay. The
result is parsed again and must differ from the original in these keys alone; a file of which that
cannot be made certain is refused.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tuner.search_spaces.errors import InputError
from tuner.workload.yaml_keys import changed_keys, check_plain, read_text

__all__ = ["changed_text", "parsed_file", "read_key"]

#: No configuration of a training is larger; a larger file is not read.
_MOST_BYTES = 4 * 2**20


def read_key(path: Path, key: str) -> Any:
    """Return the value of a key.

    Args:
        path: a file with the suffix .json, .yaml, .yml or .toml.
        key: names of tables and of the key, with dots between them.

    Raises:
        InputError: the file cannot be read, or has no such key with a single value.
    """
    data: Any = _parsed(_text(path), path)
    for name in key.split("."):
        if not isinstance(data, Mapping) or name not in data:
            raise InputError(
                f"{path.name} has no key {key}; add it there with the value that you use today"
            )
        data = data[name]
    if not isinstance(data, bool | int | float | str):
        raise InputError(f"{key} of {path.name} is not a number, a text or a truth value")
    return data


def parsed_file(path: Path) -> Any:
    """Return the data of a JSON, YAML or TOML file.

    Raises:
        InputError: it cannot be read.
    """
    return _parsed(_text(path), path)


def changed_text(path: Path, changes: Mapping[str, Any], *, may_add: bool = False) -> str:
    """Return the text of a file with other values of some keys.

    Args:
        path: as for `read_key`.
        changes: the new values by key.
        may_add: add keys that the file does not have, and take those away whose value is None.

    Raises:
        InputError: as `read_key`, or a key's value cannot be replaced alone.
    """
    text = _text(path)
    wanted = copy.deepcopy(_parsed(text, path))
    for key, value in changes.items():
        if not may_add and read_key(path, key) == value:
            continue
        text = _changed(text, path, wanted, key, value)
    if _parsed(text, path) != wanted:
        raise InputError(
            f"of {path.name} {' and '.join(changes)} cannot be changed alone; write each on a "
            "line of its own"
        )
    return text


def _changed(text: str, path: Path, wanted: Any, key: str, value: Any) -> str:
    """Set a key in `wanted`, and return the text with that change."""
    *tables, last = key.split(".")
    table, depth = wanted, 0
    for name in tables:
        if not isinstance(table, dict):
            raise InputError(f"{path.name} cannot have the key {key}")
        depth += name in table
        table = table.setdefault(name, {})
    if not isinstance(table, dict):
        raise InputError(f"{path.name} cannot have the key {key}")
    there = last in table
    if value is None:
        if not table.pop(last, None) and not there:
            return text
    elif there and table[last] == value and type(table[last]) is type(value):
        return text
    else:
        table[last] = value
    if path.suffix == ".json":
        return json.dumps(wanted, indent=2) + "\n"
    if path.suffix in (".yaml", ".yml"):
        if value is None or depth < len(tables):
            return str(yaml.safe_dump(wanted, sort_keys=False))  # comments do not survive this
        return changed_keys(text, {tuple(key.split(".")): value}, path)
    if there:
        start, end = _place(text, path, key)
        if value is None:
            start = text.rfind("\n", 0, start) + 1
            return text[:start] + text[end:].partition("\n")[2]
        return text[:start] + json.dumps(value) + text[end:]
    return _added_to_toml(text, ".".join(tables), f"{last} = {json.dumps(value)}\n")


def _added_to_toml(text: str, table: str, line: str) -> str:
    """Return the text of a TOML file with a line below the header of a table."""
    position = 0
    for present in text.splitlines(keepends=True):
        header = _HEADER.match(present.rstrip("\r\n"))
        if not table and (header or present.lstrip().startswith("[[")):
            break
        position += len(present)
        if header and header["name"].strip() == table:
            break
    else:
        end = "" if not text or text.endswith("\n") else "\n"
        return text + end + (f"\n[{table}]\n" if table else "") + line
    head = text[:position]
    return head + ("" if not head or head.endswith("\n") else "\n") + line + text[position:]


def _text(path: Path) -> str:
    try:
        if not path.is_file():
            raise InputError(f"{path} is not a file (standard input cannot be read twice)")
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{path} is too large for a configuration")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error}") from error
    return read_text(path)


def _parsed(text: str, path: Path) -> Any:
    """Return the data of a file's text.

    Raises:
        InputError: it is not what its suffix says, or YAML with anchors or merge keys.
    """
    try:
        if path.suffix == ".json":
            return json.loads(text)
        if path.suffix == ".toml":
            return tomllib.loads(text)
        check_plain(text, path)
        return yaml.safe_load(text)
    except InputError:
        raise
    except Exception as error:  # PyYAML's errors share no class with those of the others
        problem = " ".join(str(error).split())
        raise InputError(f"{path} is not valid {path.suffix[1:].upper()}: {problem}") from error


def _place(text: str, path: Path, key: str) -> tuple[int, int]:
    """Return where the text of a key's value begins and ends in a TOML file.

    Raises:
        InputError: it cannot be found.
    """
    found = _toml_place(text, key)
    if found is None:
        raise InputError(
            f"cannot find {key} in the text of {path.name}; write it on a line of its own"
        )
    return found


_HEADER = re.compile(r"\s*\[(?P<name>[^\[\]]+)\]\s*(#.*)?$")
_LINE = re.compile(
    r"\s*(?P<name>[\w.-]+)\s*=\s*"
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s#\"'\[{,]+)\s*(#.*)?$"
)


def _toml_place(text: str, key: str) -> tuple[int, int] | None:
    """Return the place of a value that stands on one line of a table; else None."""
    table, position = "", 0
    for line in text.splitlines(keepends=True):
        body = line.rstrip("\r\n")
        if header := _HEADER.match(body):
            table = ".".join(part.strip() for part in header["name"].split("."))
        elif body.lstrip().startswith("[["):
            table = "[["
        elif (found := _LINE.match(body)) and f"{table}.{found['name']}".lstrip(".") == key:
            return position + found.start("value"), position + found.end("value")
        position += len(line)
    return None

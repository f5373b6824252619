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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tuner.search_spaces.declared import FILE_KINDS
from tuner.search_spaces.errors import InputError

#: No configuration of a training is larger; a larger file is not read.
_MOST_BYTES = 4 * 2**20


def read_key(path: Path, key: str) -> Any:
    """Return the value of a key (names with dots); InputError if there is no single value."""
    data: Any = _parsed(read_text(path), path)
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
    """Return the data of a JSON, YAML or TOML file; InputError if it cannot be read."""
    return _parsed(read_text(path), path)


def changed_text(path: Path, changes: Mapping[str, Any], *, may_add: bool = False) -> str:
    """Return the text of a file with other values of some keys.

    With `may_add`, keys that the file lacks are added and those whose value is None taken away.
    InputError as `read_key`, or if a key's value cannot be replaced alone.
    """
    text = read_text(path)
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
    if path.suffix != ".toml":
        if value is None or depth < len(tables):
            return str(yaml.safe_dump(wanted, sort_keys=False))  # comments do not survive this
        return changed_yaml(text, key.split("."), value, path)
    if there:
        start, end = _place(text, path, key)
        if value is None:
            start = text.rfind("\n", 0, start) + 1
            return text[:start] + text[end:].partition("\n")[2]
        return text[:start] + json.dumps(value) + text[end:]
    return _added_to_toml(text, ".".join(tables), f"{last} = {json.dumps(value)}\n")


def changed_yaml(text: str, keys: Sequence[str], value: Any, path: Path) -> str:
    """Return the text of a YAML file with one value changed, by its key and the keys above it.

    A key that its section lacks is added at the section's end; InputError if that is missing.
    """
    check_plain(text, path)
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    for depth, key in enumerate(keys):
        if not isinstance(node, yaml.MappingNode):
            raise InputError(f"{path} has no section {'.'.join(keys[:depth]) or 'of keys'}")
        found = next((held for name, held in node.value if name.value == key), None)
        if found is None and depth == len(keys) - 1:
            return _added_to_yaml(text, node, key, value)
        if found is None:
            raise InputError(f"{path} has no section {'.'.join(keys[: depth + 1])}")
        node = found
    if not isinstance(node, yaml.ScalarNode):
        raise InputError(f"{'.'.join(keys)} in {path} is not a single value")
    before, after = text[: node.start_mark.index], text[node.end_mark.index :]
    space = "" if before.endswith(" ") else " "  # an empty value begins at its colon
    return before + space * (not node.value) + _scalar(value) + after


def _added_to_yaml(text: str, section: Any, key: str, value: Any) -> str:
    line = f"{_scalar(key)}: {_scalar(value)}"  # a key such as no is quoted
    if section.flow_style:
        at = section.end_mark.index - 1
        return text[:at].rstrip() + (", " if section.value else "") + line + text[at:]
    name, last = section.value[-1]
    at = text.find("\n", min(last.end_mark.index, len(text)))
    if last.end_mark.column == 0 and last.end_mark.index > last.start_mark.index:
        at = last.end_mark.index - 1  # a nested section ends where the next line begins
    head = text if at < 0 else text[:at]
    rest = "" if at < 0 else text[at:]
    return f"{head.rstrip()}\n{' ' * name.start_mark.column}{line}{rest or chr(10)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and value.replace("_", "").replace("-", "").isalnum():
        quoted = value.lower() in ("no", "yes", "on", "off", "true", "false", "null", "y", "n")
        return f"'{value}'" if quoted or value[0].isdigit() else value
    text = json.dumps(value)
    # 1e-05 is a text in YAML 1.1, 1.0e-05 a number.
    return re.sub(r"^(-?\d+)(?=e)", r"\1.0", text) if isinstance(value, float) else text


def _toml_lines(text: str) -> Iterator[tuple[int, str, str]]:
    # Yield each line, with its place before it and the table that it belongs to after it.
    table, at = "", 0
    for line in text.splitlines(keepends=True):
        if header := _HEADER.match(line.rstrip("\r\n")):
            table = ".".join(part.strip() for part in header["name"].split("."))
        elif line.lstrip().startswith("[["):
            table = "[["
        yield at, line, table
        at += len(line)


def _added_to_toml(text: str, table: str, line: str) -> str:
    lines = list(_toml_lines(text))
    if table:
        found = next((at + len(header) for at, header, inside in lines if inside == table), None)
    else:
        found = next((at for at, _, inside in lines if inside), len(text))
    head, rest = (text, "") if found is None else (text[:found], text[found:])
    head += "" if not head or head.endswith("\n") else "\n"
    return head + (f"\n[{table}]\n" if found is None else "") + line + rest


def renamed(words: Sequence[str], cwd: Path, file: Path, written: Path) -> list[str]:
    """Return a command in which `written` stands wherever it names `file`."""
    made = list(words)
    for at, word in enumerate(words):
        before, equals, value = word.rpartition("=")
        if word.endswith(FILE_KINDS) and (cwd / value).resolve() == file.resolve():
            made[at] = f"{before}{equals}{written}"
    return made


def read_text(path: Path) -> str:
    """Return the text of a file; InputError if it cannot be read, or is no configuration's."""
    try:
        if not path.is_file():
            raise InputError(f"{path} is not a file (standard input cannot be read twice)")
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{path} is too large for a configuration")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def _parsed(text: str, path: Path) -> Any:
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
        kind = path.suffix[1:].upper() if path.suffix in (".json", ".toml") else "YAML"
        raise InputError(f"{path} is not valid {kind}: {problem}") from error


def check_plain(text: str, path: Path) -> None:
    """Raise InputError for anchors, aliases and merge keys, which carry a change to other keys."""
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = event.start_mark.line + 1
            if isinstance(event, yaml.NodeEvent) and event.anchor:
                raise InputError(
                    f"{path} holds the YAML anchor or alias {event.anchor!r} in line {line}; write "
                    "the values out, for a changed one would change in several places"
                )
            if isinstance(event, yaml.ScalarEvent) and event.value == "<<" and event.implicit[0]:
                raise InputError(
                    f"{path} holds a YAML merge key (<<) in line {line}; write the keys out"
                )
    except yaml.YAMLError as error:
        raise InputError(f"{path} is no YAML: {' '.join(str(error).split())}") from error


_HEADER = re.compile(r"\s*\[(?P<name>[^\[\]]+)\]\s*(#.*)?$")
_LINE = re.compile(
    r"\s*(?P<name>[\w.-]+)\s*=\s*"
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s#\"'\[{,]+)\s*(#.*)?$"
)


def _place(text: str, path: Path, key: str) -> tuple[int, int]:
    for at, line, table in _toml_lines(text):
        found = _LINE.match(line.rstrip("\r\n"))
        if found and f"{table}.{found['name']}".lstrip(".") == key:
            return at + found.start("value"), at + found.end("value")
    raise InputError(f"cannot find {key} in the text of {path.name}; write it on a line of its own")

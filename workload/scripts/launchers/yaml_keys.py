"""Changed keys of a YAML file, with every other character kept: comments, order and quotes.

PyYAML's composer says where each value stands in the text, so a value is replaced in place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError

__all__ = ["changed_keys", "check_config"]


def check_config(option: str, file: str, cwd: Path | None) -> None:
    """Refuse a configuration file from which a changed one could not be written.

    Raises:
        InputError: it is standard input, does not exist, is no YAML, or holds anchors, aliases or
            merge keys, which would carry a changed value to other keys.
    """
    if file == "-" or file.startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/")):
        raise InputError(
            f"{option} is read from standard input, which is there only once; write it to a file"
        )
    path = (cwd or Path.cwd()) / file
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return  # of another format, or the launcher's own parser says that it is missing
    _check_plain(_read(path), path)


def changed_keys(path: Path, changes: Mapping[tuple[str, ...], Any]) -> str:
    """Return the text of a YAML file with some scalar values changed.

    Args:
        path: the file.
        changes: new value by key; ("a", "b") is the key b below a. A key that its section lacks is
            added at the section's end.

    Raises:
        InputError: the file cannot be read or holds anchors, or a section is missing.
    """
    text = _read(path)
    for keys, value in changes.items():
        text = _changed(text, keys, value, path)
    return text


def _changed(text: str, keys: tuple[str, ...], value: Any, path: Path) -> str:
    import yaml

    _check_plain(text, path)
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    for depth, key in enumerate(keys):
        if not isinstance(node, yaml.MappingNode):
            raise InputError(f"{path} has no section {'.'.join(keys[:depth]) or 'of keys'}")
        found = next((held for name, held in node.value if name.value == key), None)
        if found is None and depth == len(keys) - 1:
            return _added(text, node, key, value)
        if found is None:
            raise InputError(f"{path} has no section {'.'.join(keys[: depth + 1])}")
        node = found
    if not isinstance(node, yaml.ScalarNode):
        raise InputError(f"{'.'.join(keys)} in {path} is not a single value")
    before, after = text[: node.start_mark.index], text[node.end_mark.index :]
    space = "" if before.endswith(" ") else " "  # an empty value begins at its colon
    return before + space * (not node.value) + _scalar(value) + after


def _added(text: str, section: Any, key: str, value: Any) -> str:
    """Return the text with a key added after the last one of a section."""
    line = f"{key}: {_scalar(value)}"
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
    return json.dumps(value)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def _check_plain(text: str, path: Path) -> None:
    """Refuse anchors, aliases and merge keys."""
    import yaml

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

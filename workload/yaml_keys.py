"""Changed keys of a YAML file, with every other character kept: comments, order and quotes.

PyYAML's composer says where each value stands in the text, so a value is replaced in place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tuner.search_spaces.errors import InputError

__all__ = ["changed_keys", "check_plain", "read_text"]


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def changed_keys(text: str, changes: Mapping[tuple[str, ...], Any], path: Path) -> str:
    """Return the text of a YAML file with some scalar values changed.

    Args:
        text: of the file.
        path: its name, for sentences.
        changes: new value by key; ("a", "b") is the key b below a. A key that its section lacks is
            added at the section's end.

    Raises:
        InputError: the file is no YAML or holds anchors, or a section is missing.
    """
    for keys, value in changes.items():
        text = _changed(text, keys, value, path)
    return text


def _changed(text: str, keys: tuple[str, ...], value: Any, path: Path) -> str:
    check_plain(text, path)
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
    text = json.dumps(value)
    # 1e-05 is a text in YAML 1.1, 1.0e-05 a number.
    return re.sub(r"^(-?\d+)(?=e)", r"\1.0", text) if isinstance(value, float) else text


def check_plain(text: str, path: Path) -> None:
    """Refuse what a changed value would carry to other keys.

    Raises:
        InputError: the text is no YAML, or holds anchors, aliases or merge keys.
    """
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

"""Keys that a YAML or JSON file gives twice: parsers take the last in silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from tuner.workload.scripts.key_files import read_text


def repeated_keys(path: Path) -> list[tuple[str, str]]:
    """Return the keys of a file that stand twice in one table, each with its last value."""
    try:
        node = yaml.compose(read_text(path), Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return []
    return list(_repeated(node)) if isinstance(node, yaml.MappingNode) else []


def _repeated(node: yaml.MappingNode) -> Iterator[tuple[str, str]]:
    last: dict[str, str] = {}
    twice: list[str] = []
    for key, value in node.value:
        name = str(key.value)
        if name in last:
            twice.append(name)
        last[name] = str(value.value) if isinstance(value, yaml.ScalarNode) else "a table"
    yield from ((name, last[name]) for name in dict.fromkeys(twice))

"""Mutations that make bad input, drawn by hypothesis: bent values (`shapes`) and torn bytes.

`torn` flips, cuts, doubles and inserts bytes. An input is told by its kind, the seed and the number
of the first input of its chunk.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hypothesis import strategies as st

from tests.support import shapes
from tuner.search_spaces.data_files import write_toml

Drawn = TypeVar("Drawn")


class Draw:
    """Draws of one input."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def of(self, strategy: st.SearchStrategy[Drawn]) -> Drawn:
        return self._data.draw(strategy)

    def choice(self, values: Sequence[Drawn]) -> Drawn:
        return values[self.randrange(len(values))]

    def choices(self, values: Sequence[Drawn], k: int) -> list[Drawn]:
        return [self.choice(values) for _ in range(k)]

    def randrange(self, first: int, beyond: int | None = None) -> int:
        low, high = (0, first) if beyond is None else (first, beyond)
        return self.of(st.integers(low, high - 1))

    def random(self) -> float:
        """Draw a number from 0 to 1."""
        return self.of(st.integers(0, 999)) / 1000


def nasty(draw: Draw) -> Any:
    """Draw a value that hardly fits anywhere."""
    return draw.of(shapes.VALUES)


def bent(value: Any, draw: Draw) -> Any:
    """Draw a copy with one to three parts replaced, taken away, added or scaled."""
    return draw.of(shapes.bent(value))


def torn(data: bytes, draw: Draw | random.Random) -> bytes:
    """Return the bytes with some flipped, cut, doubled or inserted."""
    data = bytes(data)
    if draw.random() < 0.02:  # deeper than a parser goes, longer than a number may be
        return data + draw.choice((b"[" * 100_000, b"x = " + b"[" * 100_000, b"x = " + b"9" * 5000))
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(data) + 1)
        head, tail, how = data[:at], data[at:], draw.randrange(5)
        if how == 0:
            data = head
        elif how == 1:
            data = head + bytes([draw.randrange(256)]) + tail[1:]
        elif how == 2:
            data = head + draw.choice((b"\x00", b"\xff\xfe", b'"', b"[", b"\n", b",", b"=")) + tail
        elif how == 3:
            data = head + tail[draw.randrange(1, 40) :]
        else:
            data += tail[:200]
    return data


def as_toml(value: Any) -> bytes:
    """TOML text of whatever `bent` made; what TOML cannot say is left out."""
    try:
        return write_toml(value if isinstance(value, Mapping) else {"value": value}).encode()
    except (UnicodeEncodeError, ValueError):
        return b"value = \xff"


def as_json(value: Any) -> bytes:
    """JSON text of whatever `bent` made."""
    try:
        return json.dumps(value).encode()
    except ValueError:  # 10**400 has more digits than Python writes
        return b"1e999999"


def as_yaml(value: Any) -> bytes:
    """YAML text of whatever `bent` made; a cycle instead of what YAML cannot say."""
    try:
        return yaml.safe_dump(value, allow_unicode=True).encode()
    except (ValueError, UnicodeEncodeError, yaml.YAMLError):
        return b"a: &a [*a]\n"


def bent_file(path: Path, sound: Any, write: Callable[[Any], bytes], draw: Draw) -> None:
    """Write a sound value as a file, bent or torn.

    Args:
        write: the value as the file's bytes, `as_toml` or `as_json`.
    """
    data = write(sound)
    path.write_bytes(torn(data, draw) if draw.random() < 0.25 else write(bent(sound, draw)))

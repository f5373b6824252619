"""Mutations that make bad input: sound values with parts replaced, and sound bytes torn.

`bent` replaces, takes away, adds or scales parts of nested tables by what a number, a name or a
table should never be; `torn` flips, cuts, doubles and inserts bytes. Both draw from the generator
that they are given, so that an input is told by its kind, its seed and its number.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tuner.search_spaces.data_files import write_toml

#: What stands where something sensible should.
NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**30, 10**400, 0.0, -0.0, 0.5, -2.5,
    1e-300, 1e300, math.nan, math.inf, -math.inf, "", " ", "0", "-1", "auto", "none", "nan", "..",
    "../../etc/passwd", "/etc/passwd", "/dev/zero/x", "a\nb", "\x00", "\x7f\x1b[31m",
    "\ud7ff\uffff", "'; touch pwned; '", "$(touch pwned)", "`touch pwned`",
    "<script>alert(1)</script>", "{rank}", "%s%n", "x" * 5000, "int8", "cuda", "adam",
    "__import__('os').system('touch pwned')", [], [None], [0], [-1, 1], ["a"], [[1]], [1] * 300,
    {}, {"": 1}, {"a": {"b": {}}}, [{"a": 1}], {"count": 10**9},
)  # fmt: skip


def nasty(draw: random.Random) -> Any:
    """One value that hardly fits anywhere."""
    return copy.deepcopy(draw.choice(NASTY))


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every part of nested lists and tables."""
    yield path
    if isinstance(value, Mapping):
        for key in value:
            yield from _places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 4)):
            yield from _places(value[index], (*path, index))


def bent(value: Any, draw: random.Random) -> Any:
    """Return a copy with one to three parts replaced, taken away, added or moved."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = [path for path in _places(value) if path]
        if not places:
            return nasty(draw)
        path = draw.choice(places)
        holder = value
        for step in path[:-1]:
            holder = holder[step]
        how = draw.random()
        if how < 0.12:
            del holder[path[-1]]
        elif how < 0.2 and isinstance(holder, dict):
            holder[draw.choice(("steps", "kind", "zzz", "", "schema"))] = nasty(draw)
        elif how < 0.3:
            here = holder[path[-1]]
            if type(here) in (int, float):
                with contextlib.suppress(OverflowError):  # an earlier bend made it too large
                    holder[path[-1]] = here * draw.choice((-1, 0, 1000, 1e-9))
            else:
                holder[path[-1]] = [here]
        else:
            holder[path[-1]] = nasty(draw)
    return value


def torn(data: bytes, draw: random.Random) -> bytes:
    """Return the bytes with some flipped, cut, doubled or inserted."""
    data = bytes(data)
    if draw.random() < 0.02:  # deeper than a parser goes, longer than a number may be
        return data + draw.choice((b"[" * 100_000, b"x = " + b"[" * 100_000, b"x = " + b"9" * 5000))
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(data) + 1)
        how = draw.randrange(5)
        if how == 0:
            data = data[:at]
        elif how == 1:
            data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
        elif how == 2:
            data = (
                data[:at]
                + draw.choice((b"\x00", b"\xff\xfe", b'"', b"[", b"\n", b",", b"="))
                + data[at:]
            )
        elif how == 3:
            data = data[:at] + data[at + draw.randrange(1, 40) :]
        else:
            data += data[at : at + 200]
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


def bent_file(path: Path, sound: Any, write: Callable[[Any], bytes], draw: random.Random) -> None:
    """Write a sound value as a file, bent or torn.

    Args:
        write: the value as the file's bytes, `as_toml` or `as_json`.
    """
    data = write(sound)
    path.write_bytes(torn(data, draw) if draw.random() < 0.25 else write(bent(sound, draw)))

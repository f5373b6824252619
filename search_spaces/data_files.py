"""TOML files of facts: those that joulefront includes, by name, and the user's own, by path."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName, reason
from tuner.search_spaces.fields import names_a_file
from tuner.search_spaces.safe_files import read_text

#: Beginning of a key of 65 names with dots: tomllib takes time that grows with their square.
_DEEP_KEY = re.compile(r"""(?<![\w-])(?:(?>[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){64}""")


#: Largest file that is read as one object of JSON: a model's configuration is a few kB.
_MOST_JSON_BYTES = 2**20


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of TOML; ValueError or RecursionError if it is not valid."""
    if _DEEP_KEY.search(text):
        raise ValueError("a key of more than 64 names with dots; give a key of fewer")
    return tomllib.loads(text)


def data_folder(kind: str) -> Traversable:
    """Return the folder of the included files of a kind: "jobs", "clusters", "models", ..."""
    return resources.files("tuner.search_spaces") / "data" / kind


def included_names(kind: str, suffix: str = ".toml") -> list[str]:
    """Return the names of the included files of a kind, sorted."""
    names = (entry.name for entry in data_folder(kind).iterdir())
    return sorted(name.removesuffix(suffix) for name in names if name.endswith(suffix))


def find_file(
    kind: str, name: str, subject: str, *, other: Iterable[str] = ("or the path of a toml file",)
) -> tuple[Traversable, str]:
    """Return the file of a name or a path, and its name without the suffix."""
    included, path = included_names(kind), Path(name)
    if name in included:
        return data_folder(kind) / f"{name}.toml", name
    if not names_a_file(path):
        raise UnknownName(subject, name, [*included, *other])
    return path, path.stem


def read_toml(file: Traversable, subject: str) -> dict[str, Any]:
    """Return the tables of a file; `subject` it describes, with its name, is for the sentence."""
    try:
        return parse_toml(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the {subject}: {reason(error)}") from error


def read_json_object(file: Traversable, subject: str) -> dict[str, Any]:
    """Read a file that holds an object of JSON; InputError or InvalidValue about `subject` if
    not."""
    try:
        data = json.loads(read_text(file, _MOST_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the {subject}: {reason(error)}") from error
    if not isinstance(data, dict):
        raise InvalidValue(subject, type(data).__name__, "a JSON object")
    return data


def plain(value: Any) -> Any:
    """Return the value in types that TOML holds: without None in tables, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value if part is not None]
    if isinstance(value, bool | int | float | str):
        return value
    return str(value)


def write_toml(data: Mapping[str, Any]) -> str:
    """Return tables of plain values as TOML text."""
    import tomlkit

    return tomlkit.dumps(plain(data))


def catalogue(name: str) -> dict[str, Any]:
    """Return the tables of a file in `data/catalogue`."""
    return read_toml(data_folder("catalogue") / f"{name}.toml", f"catalogue of {name}")


def check_keys(data: Iterable[str], allowed: Collection[str], where: str) -> None:
    """Check that a table has known keys alone."""
    for key in data:
        if key not in allowed:
            raise UnknownName(f"key in {where}", key, allowed)

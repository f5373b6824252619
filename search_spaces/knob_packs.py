"""Packs of declared knobs: TOML files with tables `[knobs.NAME]`, shipped or the user's own."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tuner.search_spaces.declared import Knob, check_knobs, read_knobs
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.typed import names_a_file

__all__ = ["KnobPack", "load_pack", "pack_names"]


@dataclass(frozen=True)
class KnobPack:
    """Knobs that are declared together.

    Attributes:
        name: name of the pack.
        knobs: its knobs.
        what: description for the user.
    """

    name: str
    knobs: tuple[Knob, ...]
    what: str = ""


def pack_names() -> list[str]:
    """Return the names of the packs that joulefront includes."""
    folder = resources.files("tuner.search_spaces") / "data" / "knobs"
    names = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def load_pack(name_or_path: str) -> KnobPack:
    """Load a pack by shipped name or by the path of a TOML file.

    Raises:
        InputError: no such pack, or its file is not one.
    """
    shipped = name_or_path in pack_names()
    path = Path(name_or_path)
    if shipped:
        source = resources.files("tuner.search_spaces") / "data" / "knobs" / f"{name_or_path}.toml"
    elif names_a_file(path):
        source = path
    else:
        known = [*pack_names(), "or the path of a toml file"]
        raise UnknownName("pack of knobs", name_or_path, known)
    try:
        data = tomllib.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the knobs {name_or_path!r}: {error}") from error
    for key in data:
        if key not in ("what", "knobs"):
            raise UnknownName(f"key in the knobs {name_or_path!r}", key, ("what", "knobs"))
    knobs = check_knobs(read_knobs(data.get("knobs"), path.name))
    return KnobPack(name_or_path if shipped else path.stem, knobs, str(data.get("what", "")))

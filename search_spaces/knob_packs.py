"""Packs of declared knobs: TOML files with tables `[knobs.NAME]`, shipped or the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tuner.search_spaces.data_files import check_keys, find_file, included_names, read_toml
from tuner.search_spaces.declared import Knob, check_knobs, read_knobs


@dataclass(frozen=True)
class KnobPack:
    """Knobs that are declared together."""

    name: str
    knobs: tuple[Knob, ...]
    what: str = ""


def pack_names() -> list[str]:
    """Return the names of the packs that joulefront includes."""
    return included_names("knobs")


def load_pack(name_or_path: str) -> KnobPack:
    """Load a pack by shipped name or by the path of a TOML file."""
    file, name = find_file("knobs", name_or_path, "pack of knobs")
    data = read_toml(file, f"knobs {name_or_path!r}")
    check_keys(data, ("what", "knobs"), f"the knobs {name_or_path!r}")
    knobs = check_knobs(read_knobs(data.get("knobs"), Path(name_or_path).name))
    return KnobPack(name, knobs, str(data.get("what", "")))

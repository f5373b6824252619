"""Reader of one TOML table of a driver: each key once, of its type, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.typed import plain_text

Made = TypeVar("Made")


class Table:
    """Table of a parsed TOML file.

    Args:
        where: its name and file, for sentences: "[probe] of torchtitan.toml".

    Raises:
        InputError: it is no table, or has another key.
    """

    def __init__(self, data: Any, where: str, *known: str) -> None:
        if not isinstance(data, Mapping):
            raise InputError(f"{where} must be a table")
        for key in data:
            if known and key not in known:
                raise UnknownName("key", str(key)[:80], known, where=f" in {where}")
        self.data, self.where, self.file = data, where, where.rpartition(" of ")[2]

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text.

        Raises:
            InputError: it is missing without a default, or no text.
        """
        if key not in self.data and default is not None:
            return default
        value = self.data.get(key)
        if not isinstance(value, str):
            raise InputError(f"{key} in {self.where} must be a text")
        return plain_text(value, f"{key} in {self.where}")

    def choice(self, key: str, legal: tuple[str, ...]) -> str:
        """Return one of some texts, the first by default."""
        value = self.text(key, legal[0])
        if value not in legal:
            raise UnknownName(key, value, legal, where=f" in {self.where}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts; a single one may stand alone; empty by default."""
        value = self.data.get(key, [])
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise InputError(f"{key} in {self.where} must be a list of texts")
        return tuple(plain_text(part, f"{key} in {self.where}") for part in parts)

    def value(self, key: str) -> Any:
        """Return a number, text or truth value; None if there is none."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, bool | int | float | str):
            raise InputError(f"{key} in {self.where} must be a number, a text or a truth value")
        return value

    def values(self, key: str) -> dict[str, Any]:
        """Return a table of numbers, texts and truth values; empty by default."""
        part = self.part(key)
        return {name: part.value(name) for name in part.data}

    def made(self, kind: type[Made], /, **given: Any) -> Made:
        """Make a dataclass of this table by the types of its fields.

        Args:
            given: by field, the values that are made otherwise.

        Raises:
            InputError: a text without a default is missing, or a value has another type.
        """
        values = dict(given)
        for item in fields(kind):  # type: ignore[arg-type]
            if item.name in values:
                continue
            if item.type == "str":
                default = None if item.default is MISSING else str(item.default)
                values[item.name] = self.text(item.name, default)
            elif item.type == "tuple[str, ...]":
                values[item.name] = self.texts(item.name) or item.default
            else:
                value = self.value(item.name)
                values[item.name] = value is True if item.type == "bool" else value
        return kind(**values)

    def part(self, key: str, *known: str) -> Table:
        """Return a table inside this one; empty by default."""
        return Table(self.data.get(key, {}), f"[{key}] of {self.file}", *known)

    def parts(self, key: str, *known: str) -> list[Table]:
        """Return the tables of a list; empty by default."""
        value = self.data.get(key, [])
        if not isinstance(value, list):
            raise InputError(f"{key} in {self.where} must be a list of tables, [[{key}]]")
        return [Table(item, f"[[{key}]] of {self.file}", *known) for item in value]

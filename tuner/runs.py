"""The folder of a study: where its files stand, who may write them, and what was asked.

`study.toml` records the job, the cluster, the space and the choices, so that a second `optimize`
under the same name can tell whether it is the same question, and so that `tuner front` and its
like can answer from the folder alone. One driver at a time holds the folder's lock.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_spaces.errors import InputError, InvalidValue, UnknownName
from search_spaces.typed import names_a_file

__all__ = ["STUDY_SCHEMA", "RunFolder", "find_run", "plain", "write_toml"]

#: Version of study.toml. A reader takes this one and older ones; the first release wrote none.
STUDY_SCHEMA = 1


#: What in study.toml is a table.
_SECTIONS = (
    "job",
    "cluster",
    "space",
    "recorded",
    "constraints",
    "settings",
    "versions",
    "ended",
)


def plain(value: Any) -> Any:
    """The same value in types that TOML holds: None is left out of tables, tuples become lists."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value if part is not None]
    if isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(part) for part in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def write_toml(data: Mapping[str, Any]) -> str:
    """Tables of plain values as TOML text; the standard library only reads it."""

    def lines(table: Mapping[str, Any], name: str) -> Iterator[str]:
        if name:
            yield f"\n[{name}]"
        for key, value in table.items():
            if not isinstance(value, Mapping):
                yield f"{_toml_key(key)} = {_toml_value(value)}"
        for key, value in table.items():
            if isinstance(value, Mapping):
                yield from lines(value, f"{name}.{_toml_key(key)}" if name else _toml_key(key))

    return "\n".join(lines(plain(data), "")).lstrip("\n") + "\n"


@dataclass(frozen=True)
class RunFolder:
    """The files of one study."""

    path: Path

    @classmethod
    def named(cls, runs_dir: str | Path, name: str) -> RunFolder:
        """The folder of the study `name`; it need not exist.

        Raises:
            InvalidValue: the name cannot be a folder's.
        """
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
            raise InvalidValue(
                "name", name, "letters, digits, '.', '_' and '-', not starting with '.' or '-'"
            )
        return cls(Path(runs_dir) / name)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def trace(self) -> Path:
        return self.path / "trace" / "probes.jsonl"

    @property
    def asked(self) -> Path:
        return self.path / "study.toml"

    @property
    def journal(self) -> Path:
        return self.path / "study.journal"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def read_asked(self) -> dict[str, Any] | None:
        """What study.toml holds; None where there is none yet.

        Raises:
            InputError: it is there and cannot be read, or a newer release wrote it.
        """
        try:
            asked = tomllib.loads(self.asked.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"cannot read {self.asked}: {error}") from error
        schema = asked.get("schema", STUDY_SCHEMA)
        if type(schema) is not int or schema > STUDY_SCHEMA:
            raise InputError(
                f"{self.asked} has schema {schema!r}, and this release reads {STUDY_SCHEMA} and "
                "older; a newer joulefront wrote it"
            )
        for name in _SECTIONS:
            if not isinstance(asked.get(name, {}), Mapping):
                raise InputError(f"{self.asked}: {name} must be a table")
        return asked

    def write_asked(self, data: Mapping[str, Any]) -> None:
        """Replace study.toml in one step, so that a crash leaves the old one or the new one."""
        draft = self.asked.with_suffix(".toml.new")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with draft.open("w", encoding="utf-8") as file:
                file.write(write_toml(data))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.asked)
        except OSError as error:
            raise InputError(f"cannot write {self.asked}: {error.strerror}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one driver.

        Raises:
            InputError: another driver that is alive holds it, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(f"cannot make the run folder {self.path}: {error.strerror}") from error
        try:
            try:
                # The kernel lets go of it when this process ends, however it ends.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
                raise InputError(
                    f"the study {self.name!r} is being run by process {holder}; "
                    "wait until it ends, or give another name"
                ) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(fd)


def find_run(run: str | Path | None, runs_dir: str | Path = "runs") -> RunFolder:
    """A run by path or by name; the latest one when unnamed.

    Raises:
        UnknownName: there is no such run; the error lists those there are.
    """
    folder = Path(runs_dir)
    known = [path.parent for path in folder.glob("*/study.toml")] if folder.is_dir() else []
    if run is None:
        if not known:
            raise InputError(f"there is no run in {folder}; `tuner optimize` makes one")
        return RunFolder(max(known, key=lambda path: (path / "study.toml").stat().st_mtime))
    for path in (Path(run), folder / run):
        if names_a_file(path / "study.toml"):
            return RunFolder(path)
    raise UnknownName("run", str(run), [path.name for path in known])

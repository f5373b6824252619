"""The folder of a study: paths of its files, its lock, and study.toml.

`study.toml` records the job, the cluster, the space and the choices, so that a second `optimize`
under the same name can tell whether it is the same question, and so that `tuner show` and its
like can answer from the folder alone. One driver at a time holds the folder's lock.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import os
import re
import shutil
import stat
import time
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from tuner.search_spaces.data_files import parse_toml, write_toml
from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName, reason
from tuner.search_spaces.fields import names_a_file, plain_text
from tuner.search_spaces.model_sizes import READER
from tuner.search_spaces.plugins import shipped_module
from tuner.search_spaces.safe_files import (
    ARCHIVED,
    TemporaryFolder,
    open_plain,
    open_to_read,
    private_folder,
    read_bytes,
    require_own,
    write_text,
)
from tuner.workload.records.probe import Basis, ProbeRecord
from tuner.workload.records.trace import read_trace

# Runs in zip files: unpacked into a temporary folder, after their table of contents is checked.
#
# Such a file may come from anybody. Every name in it must lead into the run's folder, links and
# devices are refused, and only what an answer is read from is unpacked, up to a limit. The folder
# is removed when the process ends.


#: Limits of a zip file: its entries, the size of their table, which is read as a whole, and the
#: size of all that is unpacked.
MAX_ENTRIES, MAX_TABLE_BYTES, MAX_UNPACKED_BYTES = 50_000, 8 * 2**20, 512 * 2**20
#: Files of a run that are unpacked. Its report, logs, journal and launch files are not.
_READ = ("study.toml", "plan.json", "trace/probes.jsonl", "trace/power/*.csv.gz", "table/*")
#: Bits of an entry that say that it is encrypted.
_ENCRYPTED = 0x1 | 0x40 | 0x2000
#: Folders of the zip files that this process has unpacked, by path and state of the file.
_unpacked: dict[tuple[object, ...], Path] = {}


def is_archive(path: Path) -> bool:
    """Return True if a path is that of a zip file, by its suffix."""
    return path.suffix.lower() == ".zip" and names_a_file(path)


def unpacked(path: Path) -> Path:
    """Unpack the run in a zip file, and return its folder, which lasts as long as the process.

    The run's files are at the top of the zip file or in one folder there. Nothing is written to
    such a folder or started from it (`require_own`).

    Raises:
        InputError: it cannot be read, holds no run, or what it holds is refused.
    """
    try:
        with _Bounded(io.FileIO(open_to_read(path))) as file:
            status = os.fstat(file.fileno())
            key = (path.resolve(), status.st_ino, status.st_size, status.st_mtime_ns)
            if key not in _unpacked:
                _unpacked[key] = _unpack(file, path.resolve())
            return _unpacked[key]
    except InputError as error:
        raise InputError(f"cannot read the run in {path}: {error}") from error
    except zipfile.BadZipFile as error:
        raise InputError(
            f"cannot read the run in {path}: not a whole zip file ({error})"
        ) from error
    except Exception as error:  # of a damaged file, zipfile and zlib raise any of ten
        raise InputError(f"cannot read the run in {path}: {reason(error)}") from error


class _Bounded(io.BufferedReader):
    """File that refuses large reads: `zipfile` reads the table of contents at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_TABLE_BYTES:
            raise InputError(f"its table of contents exceeds {MAX_TABLE_BYTES // 2**20} MiB")
        return super().read(size)


def _unpack(file: io.BufferedReader, path: Path) -> Path:
    with zipfile.ZipFile(file) as archive:
        if len(archive.infolist()) > MAX_ENTRIES:
            raise InputError(f"it holds more than {MAX_ENTRIES:,} entries")
        files = _checked(archive)
        top = _top(files)
        wanted = {
            name[len(top) :]: entry
            for name, entry in files.items()
            if name[: len(top)] == top and any(_matches(name[len(top) :], each) for each in _READ)
        }
        if sum(entry.file_size for entry in wanted.values()) > MAX_UNPACKED_BYTES:
            limit = f"{MAX_UNPACKED_BYTES // 2**20} MiB"
            raise InputError(f"the files that a run is read from take more than {limit} unpacked")
        folder = TemporaryFolder()
        try:
            (folder.path / ARCHIVED).write_text(str(path), encoding="utf-8")
            run = folder.path / (top[0] if top else path.stem)
            for name, entry in wanted.items():
                target = run.joinpath(*name)
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as source, target.open("xb") as sink:
                    shutil.copyfileobj(source, sink)  # no more than its file_size
        except BaseException:
            folder.remove()
            raise
    atexit.register(folder.remove)
    return run


def _matches(name: tuple[str, ...], pattern: str) -> bool:
    parts = pattern.split("/")
    return len(name) == len(parts) and all(map(fnmatchcase, name, parts))


def _checked(archive: zipfile.ZipFile) -> Mapping[tuple[str, ...], zipfile.ZipInfo]:
    # The files by the parts of their names.
    files: dict[tuple[str, ...], zipfile.ZipInfo] = {}
    folders: set[tuple[str, ...]] = set()
    for entry in archive.infolist():
        name = entry.orig_filename  # `filename` ends at a NUL
        parts = tuple(part for part in name.removesuffix("/").split("/") if part != ".")
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if "\\" in name or not name.isprintable() or ".." in parts or "" in parts:
            raise InputError(f"the name {name[:80]!r} in it does not lead into the run's folder")
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise InputError(f"{name[:80]!r} in it is a link or a device")
        if entry.flag_bits & _ENCRYPTED:
            raise InputError("it is encrypted; unpack it with its password, and name the folder")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InputError(f"{name[:80]!r} in it is compressed otherwise than by deflate")
        folders.update(parts[:end] for end in range(1, len(parts)))
        if name.endswith("/"):
            folders.add(parts)
        elif parts in files:
            raise InputError(f"it holds two files named {name[:80]!r}")
        else:
            files[parts] = entry
    if both := folders & files.keys():
        raise InputError(f"{'/'.join(min(both))[:80]!r} in it is a file and a folder")
    return files


def _top(files: Collection[tuple[str, ...]]) -> tuple[str, ...]:
    # Folder of the run in the zip file.
    if ("study.toml",) in files:
        return ()
    tops = [name[:1] for name in files if len(name) == 2 and name[1] == "study.toml"]
    if not tops:
        raise InputError("it holds no study.toml, at its top or in one folder, so it is no run")
    if len(tops) > 1:
        named = " and ".join(repr(top[0][:80]) for top in tops[:2])
        raise InputError(f"it holds several runs, such as {named}; unpack it, and name one")
    return tops[0]


#: Version of study.toml. A reader takes this one alone.
STUDY_SCHEMA = 2


#: What in study.toml is a table.
_SECTIONS = (
    "job",
    "cluster",
    "space",
    "request",
    "recorded",
    "constraints",
    "settings",
    "versions",
    "baseline",
    "plan",
    "ended",
)


#: The most that is read of study.toml, which takes some kilobytes: a sparse file costs no disk, and
#: reading one of a gigabyte took two of memory.
_MAX_STUDY_BYTES = 16 * 2**20
#: A look at a lock (`tuner runs`) takes a moment of it; a search waits so long for it, seconds.
_POLL_S = 1.0


@dataclass(frozen=True)
class RunFolder:
    """Files of one study."""

    path: Path

    @classmethod
    def named(cls, runs_dir: str | Path, name: str) -> RunFolder:
        """Return the folder of the study `name`, to be written to; it need not exist."""
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
            raise InvalidValue(
                "name", name, "letters, digits, '.', '_' and '-', not starting with '.' or '-'"
            )
        require_own(Path(runs_dir) / name)
        return cls(Path(runs_dir) / name)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def trace(self) -> Path:
        return self.path / "trace" / "probes.jsonl"

    def records(self) -> tuple[ProbeRecord, ...]:
        """Return the records of the trace, none without one; InputError as `read_trace`."""
        try:
            self.trace.stat()
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except OSError as error:  # another user has closed the folder
            raise InputError(f"cannot read {self.trace}: {error.strerror}") from error
        return read_trace(self.trace).records

    def probe_names(self, records: Iterable[ProbeRecord]) -> set[str]:
        """Return the names of the probes of these records, and of those that left files."""
        folder = self.path / "probes"
        left = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        return left | {record.request.probe_id for record in records}

    @property
    def study_file(self) -> Path:
        return self.path / "study.toml"

    @property
    def journal(self) -> Path:
        """Path of Optuna's journal."""
        return self.path / "study.journal"

    @property
    def stop_file(self) -> Path:
        """Path of the file whose presence ends the search after the running probes."""
        return self.path / ".stop"

    @property
    def report(self) -> Path:
        """Path of the report's page."""
        return self.path / "report.html"

    def read_study(self) -> dict[str, Any] | None:
        """Return the tables of study.toml; None if there is none yet."""
        try:
            data = read_bytes(self.study_file, _MAX_STUDY_BYTES)
            if len(data) > _MAX_STUDY_BYTES:
                raise ValueError(f"it holds more than {_MAX_STUDY_BYTES // 2**20} MiB")
            study = parse_toml(data.decode("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"cannot read {self.study_file}: {reason(error)}") from error
        if (reader := shipped_module(READER)) is not None:
            reader.take_kept_counts(study)
        if (schema := study.get("schema")) != STUDY_SCHEMA:
            versions = study.get("versions")
            by = versions.get("joulefront") if isinstance(versions, Mapping) else None
            raise InputError(
                f"{self.study_file} was written by joulefront {by or 'of an unknown version'} "
                f"(schema {schema}), and this one reads schema {STUDY_SCHEMA} only; give another "
                "name to start a new run"
            )
        for name in _SECTIONS:
            if not isinstance(study.get(name, {}), Mapping):
                raise InputError(f"{self.study_file}: {name} must be a table")
        for name in ("space", "baseline"):  # which name knobs
            for text in _texts(study.get(name, {})):
                plain_text(text, f"a text of [{name}] in {self.study_file}")
        return study

    def write_study(self, data: Mapping[str, Any]) -> None:
        """Replace study.toml in one step, so that a crash leaves the old one or the new one."""
        try:
            private_folder(self.path)
            write_text(self.study_file, write_toml(data), durable=True)
        except OSError as error:
            raise InputError(f"cannot write {self.study_file}: {error.strerror}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one driver; InputError if another one that is alive holds it."""
        require_own(self.path)
        try:
            private_folder(self.path)
        except OSError as error:
            raise InputError(f"cannot make the run folder {self.path}: {error.strerror}") from error
        try:
            fd = open_plain(self.path / ".lock", os.O_CREAT)
        except OSError as error:
            raise InputError(f"cannot lock {self.path / '.lock'}: {error.strerror}") from error
        try:
            # The kernel lets go of it when this process ends, however it ends.
            if not _lock(fd, fcntl.LOCK_EX, limit_s=_POLL_S):
                holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
                raise InputError(
                    f"the study {self.name!r} is being run by process {holder}; "
                    "wait until it ends, or give another name"
                )
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(fd)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a TOML value, names in tables included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield name
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def new_name(stem: str, runs_dir: str | Path) -> str:
    """Return a name that no run has: the stem and the time."""
    tidy = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-")[:60] or "study"
    name = first = f"{tidy}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 2
    while (Path(runs_dir) / name).exists():
        name, number = f"{first}-{number}", number + 1
    return name


def find_run(run: str | Path | None, runs_dir: str | Path = "runs") -> RunFolder:
    """Return a run by path or by name; the latest one when unnamed.

    Args:
        run: text with a path separator, "." and ".." are a path; another text is the name of a run
            in `runs_dir`, or else of a folder here. A `Path` is a path, or else a name. A zip file
            is unpacked (`tuner.problem.run_folder.unpacked`).

    Raises:
        InputError: there is no such run, or it cannot be read.
    """
    folder = Path(runs_dir)
    runs = [path for _, path in _runs_in(folder)] if folder.is_dir() else []
    if run is None:
        if not runs:
            raise InputError(f"there is no run in {folder.resolve()}; `tuner optimize` makes one")
        return RunFolder(runs[0])
    places = [folder / run, Path(run)]
    if isinstance(run, Path):
        places.reverse()
    elif os.sep in run or run in (os.curdir, os.pardir):
        places = [Path(run)]
    for path in places:
        if names_a_file(path / "study.toml"):
            return RunFolder(path)
        if is_archive(path):
            return RunFolder(unpacked(path))
    for path in places:
        if os.path.lexists(path / "study.toml"):
            raise InputError(
                f"{path / 'study.toml'} is not a regular file, so the run {path.name} is not read"
            )
    names = [path.name for path in runs]
    raise UnknownName("run", str(run), names, where=f" in {folder.resolve()}")


Kind = Literal["measured", "plan", "recording", "unknown"]
State = Literal["running", "interrupted", "done", "unreadable"]


@dataclass(frozen=True)
class RunEntry:
    """A run in a list.

    Attributes:
        kind: "measured", "plan" (predicted, or on a simulated cluster), "recording" (a trace,
            table or past runs) or "unknown" (nothing was probed).
        state: "running" (a process holds it), "interrupted", "done" or "unreadable".
    """

    name: str
    job: str
    cluster: str
    kind: Kind
    state: State
    probes: int
    changed: str
    size_bytes: int


def list_runs(runs_dir: str | Path) -> list[RunEntry]:
    """Return the runs of a folder, the latest first."""
    return [_entry(RunFolder(path), changed_s) for changed_s, path in _runs_in(Path(runs_dir))]


def _runs_in(runs_dir: Path) -> list[tuple[float, Path]]:
    # Time of change and folder of each run, the latest first; one may vanish meanwhile.
    found = []
    for path in runs_dir.glob("*/study.toml"):
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path.parent))
    return sorted(found, reverse=True)


def _size_bytes(folder: Path) -> int:
    # Beside a running search files vanish, and another user may have closed a folder.
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_size
    return size


def _entry(folder: RunFolder, changed_s: float) -> RunEntry:
    size = _size_bytes(folder.path)
    stamp = datetime.fromtimestamp(changed_s).isoformat(sep=" ", timespec="minutes")
    try:
        study = folder.read_study() or {}
        records = folder.records()
    except InputError:
        return RunEntry(folder.path.name, "", "", "unknown", "unreadable", 0, stamp, size)
    recorded = study.get("recorded", {})
    kind: Kind = "measured" if records else "unknown"
    if recorded:
        kind = "recording"
    elif "plan" in study or (records and records[0].meter.basis is Basis.PREDICTED):
        kind = "plan"
    stop = study.get("ended", {}).get("stop_reason", {})
    ended = stop.get("kind") if isinstance(stop, dict) else None
    state: State = "done"
    if _is_held(folder):
        state = "running"
    elif ended in ("running", "interrupted"):  # a killed process could not write how it ended
        state = "interrupted"
    job = study.get("job", {}).get("name") or recorded.get("table") or ""
    cluster = study.get("cluster", {}).get("name", "")
    return RunEntry(
        folder.path.name, str(job), str(cluster), kind, state, len(records), stamp, size
    )


def stop_run(runs_dir: str | Path, name: str) -> Path:
    """Ask the search of a run to end after the probes that are running; return the run's folder."""
    folder = find_run(name, runs_dir)
    require_own(folder.path)
    if not _is_held(folder):
        raise InputError(f"no search holds the run {folder.name!r}, so there is nothing to stop")
    write_text(folder.stop_file, "stop after the running probes\n")
    return folder.path


def _is_held(folder: RunFolder) -> bool:
    try:
        fd = open_to_read(folder.path / ".lock")
    except OSError:
        return False
    try:
        return not _lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _lock(fd: int, kind: int, limit_s: float = 0.0) -> bool:
    # Lock a file, for which another process that only looks (`_is_held`) has to be awaited.
    until_s = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() >= until_s:
                return False
        time.sleep(0.02)


def remove_run(runs_dir: str | Path, name: str) -> Path:
    """Delete a run with everything that it measured; return its folder."""
    runs = {path.parent.name: path.parent for path in Path(runs_dir).glob("*/study.toml")}
    if name not in runs:
        raise UnknownName("run", name, runs, where=f" in {Path(runs_dir).resolve()}")
    folder = RunFolder(runs[name])
    require_own(folder.path)
    if folder.path.is_symlink():
        raise InputError(f"{folder.path} is a link; remove the link or the folder it leads to")
    if _is_held(folder):
        raise InputError(f"the run {name!r} is being run; wait until it ends, or interrupt it")
    shutil.rmtree(folder.path)
    return folder.path

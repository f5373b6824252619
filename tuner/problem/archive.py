"""Runs in zip files: unpacked into a temporary folder, after their table of contents is checked.

Such a file may come from anybody. Every name in it must lead into the run's folder, links and
devices are refused, and only what an answer is read from is unpacked, up to a limit. The folder is
removed when the process ends.
"""

from __future__ import annotations

import atexit
import io
import os
import shutil
import stat
import zipfile
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from tuner.search_spaces.errors import InputError, reason
from tuner.search_spaces.fields import names_a_file
from tuner.search_spaces.safe_files import ARCHIVED, TemporaryFolder, open_to_read

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

"""Archive of an evidence bundle: a zip file that is read with limits and without trust.

Members are read by name into memory, checked, and only then written by `tuner.search_spaces
.safe_files`; nothing is extracted by the names or modes in the archive. The directory of the
archive is measured before `zipfile` parses it, because that alone can take gigabytes.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import write_bytes

#: Limits of what is read: files, bytes of one file, bytes of all of them unpacked.
MAX_FILES = 5_000
MAX_FILE_BYTES = 256 * 2**20
MAX_TOTAL_BYTES = 2**30
#: Largest directory of an archive: MAX_FILES entries of names of 200 bytes.
_MAX_DIRECTORY_BYTES = 2 * 2**20
#: End of the directory of a zip file (PKWARE APPNOTE 6.3.10, section 4.3.16), and its largest
#: comment; a zip64 file, which a bundle never is, has a further record before it.
_END, _END_BYTES, _MAX_COMMENT = b"PK\x05\x06", 22, 65_535
_ZIP64_LOCATOR, _ZIP64_BYTES = b"PK\x06\x07", 20
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,120}/){0,4}[A-Za-z0-9_][A-Za-z0-9._-]{0,120}")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the least a zip file can state: equal files make equal archives


def write_archive(path: Path, members: Mapping[str, bytes]) -> str:
    """Write an archive and return its sha256.

    Args:
        path: the file; replaced in one step if it exists.
        members: content by name, such as "run/study.toml".

    Raises:
        InputError: a name or the size is one that `read_archive` would refuse.
        OSError: the file cannot be written.
    """
    for name in members:
        if not _NAME.fullmatch(name):
            raise InputError(f"{name!r} cannot be the name of a file in a bundle")
    if len(members) > MAX_FILES or sum(map(len, members.values())) > MAX_TOTAL_BYTES:
        raise InputError(f"a bundle holds at most {MAX_FILES} files and {_mib(MAX_TOTAL_BYTES)}")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (stat.S_IFREG | 0o600) << 16
            archive.writestr(entry, data)
    data = buffer.getvalue()
    write_bytes(path, data, mode=0o600)
    return hashlib.sha256(data).hexdigest()


def read_archive(path: Path) -> dict[str, bytes]:
    """Return the members of an archive by name.

    Raises:
        InputError: it cannot be read, is no archive, exceeds a limit, or has a member that is not
            a plain file within its folder; one sentence.
    """
    try:
        with path.open("rb") as file:
            _check_end(path, file)
            with zipfile.ZipFile(file) as archive:
                return _members(path, archive)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{path} is damaged, or no bundle: {error}") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def _check_end(path: Path, file: BinaryIO) -> None:
    """Refuse a file whose directory is too large, from its last bytes alone."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise InputError(f"{path} is not a regular file")
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END_BYTES - _MAX_COMMENT - _ZIP64_BYTES))
    tail = file.read()
    at = tail.rfind(_END)
    if at < 0 or len(tail) - at < _END_BYTES:
        raise InputError(f"{path} is no bundle: it does not end as a zip file does")
    if tail[max(0, at - _ZIP64_BYTES) : at].startswith(_ZIP64_LOCATOR):
        raise InputError(f"{path} is larger than a bundle can be")
    entries = int.from_bytes(tail[at + 10 : at + 12], "little")
    directory = int.from_bytes(tail[at + 12 : at + 16], "little")
    if entries > MAX_FILES or directory > _MAX_DIRECTORY_BYTES:
        raise InputError(f"{path} holds more than {MAX_FILES} files")
    file.seek(0)


def _members(path: Path, archive: zipfile.ZipFile) -> dict[str, bytes]:
    entries = archive.infolist()
    if len(entries) > MAX_FILES:
        raise InputError(f"{path} holds more than {MAX_FILES} files")
    if sum(entry.file_size for entry in entries) > MAX_TOTAL_BYTES:
        raise InputError(f"{path} would take more than {_mib(MAX_TOTAL_BYTES)} unpacked")
    found: dict[str, bytes] = {}
    lower = set()
    for entry in entries:
        name = entry.filename
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if not _NAME.fullmatch(name) or name.lower() in lower:
            raise InputError(f"{path} holds a file with a name that is not allowed: {name[:80]!r}")
        if kind not in (0, stat.S_IFREG) or entry.flag_bits & 1:
            raise InputError(f"{path}: {name} is a link, encrypted, or not a regular file")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InputError(f"{path}: {name} is compressed by a method that bundles do not use")
        if entry.file_size > MAX_FILE_BYTES:
            raise InputError(f"{path}: {name} is larger than {_mib(MAX_FILE_BYTES)}")
        with archive.open(entry) as file:
            found[name] = file.read(entry.file_size + 1)  # the stated size is not believed
        if len(found[name]) != entry.file_size:
            raise InputError(f"{path}: {name} has another size than the archive states")
        lower.add(name.lower())
    return found


def _mib(size: int) -> str:
    return f"{size // 2**20} MiB"

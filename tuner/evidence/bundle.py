"""Bundle of a run: the files that its answer is computed from, and its report, in one zip file.

A redacted bundle is made of a copy of the run in which names and secrets are replaced, so that the
report in it is computed from that copy, too. A bundle that is opened is a run like any other. It
is read with limits and without trust: its directory is measured before `zipfile` parses it, which
alone can take gigabytes, and members are read by name into memory and checked before any is
written; nothing is extracted by the names or modes in the archive.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tuner.display.report import render_report
from tuner.evidence.redact import REDACTION, Redactor
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.data_files import write_toml
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import require_own, write_bytes
from tuner.search_spaces.typed import strict_json
from tuner.study.load import result_of
from tuner.workload.node.rights import private_folder
from tuner.workload.trace import read_trace

#: Files of a run beside study.toml and its trace; those after the power samples name paths.
_OF_RUN = ("trace/power/*.csv.gz", "plan.json", "table/*", "best/*")
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


@dataclass(frozen=True)
class Bundle:
    """A bundle that was written; by its checksum a reader knows that it is the one sent."""

    path: Path
    sha256: str
    files: int
    redacted: bool

    def to_json(self) -> dict[str, Any]:
        """Return the bundle as JSON values."""
        return {**vars(self), "to": "bundle", "path": str(self.path), "out": str(self.path)}

    def lines(self) -> list[str]:
        """Return what to tell the user."""
        redacted = f"redacted    {REDACTION}; read it before you publish it"
        whole = "contains    host names, paths and arguments; --redact replaces them"
        return [
            f"bundle      {self.path}, {self.files} files",
            redacted if self.redacted else whole,
            f"sha256      {self.sha256}",
            f"open it     tuner runs open {self.path.name}",
        ]


def make_bundle(run: RunFolder, out: Path | None = None, *, redact: bool = False) -> Bundle:
    """Write the bundle of a run: RUN.bundle.zip in the current folder by default."""
    out = out or Path(f"{run.name}.bundle.zip")
    members = dict(_files(run, _redactor_of(run) if redact else None))
    with _copied(members, run.name) as copy:
        records = copy.records()
        members["report.html"] = render_report(result_of(copy), records=records).encode()
    if out.parent.resolve().is_relative_to(run.path.resolve()):
        require_own(run.path)
    return Bundle(out, write_archive(out, members), len(members), redact)


def open_bundle(
    path: str | Path, *, runs_dir: str | Path = "runs", name: str | None = None
) -> RunFolder:
    """Unpack a bundle as a new run."""
    path = Path(path)
    members = read_archive(path)
    if not members.get("study.toml", b"").strip():
        raise InputError(f"{path} is no bundle: it holds no study.toml")
    run = RunFolder.named(runs_dir, name or re.sub(r"(\.bundle)?\.zip$", "", path.name))
    if run.path.exists():
        raise InputError(f"{run.path} exists; open the bundle under another name: --name NAME")
    Path(runs_dir).mkdir(parents=True, exist_ok=True)
    require_own(run.path)
    draft = Path(tempfile.mkdtemp(prefix=".joulefront-open-", dir=runs_dir))
    try:
        _unpack(draft, members)
        result_of(RunFolder(draft))
        RunFolder(draft).opened_file.touch()  # no name that a member of an archive can have
        draft.rename(run.path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    private_folder(run.path)
    return run


@contextmanager
def redacted_copy(run: RunFolder) -> Iterator[RunFolder]:
    """Yield a temporary copy of a run in which names and secrets are replaced."""
    with _copied(dict(_files(run, _redactor_of(run))), run.name) as copy:
        yield copy


@contextmanager
def _copied(members: Mapping[str, bytes], name: str) -> Iterator[RunFolder]:
    with tempfile.TemporaryDirectory(prefix="joulefront-bundle-") as folder:
        _unpack(Path(folder) / name, members)
        yield RunFolder(Path(folder) / name)


def _redactor_of(run: RunFolder) -> Redactor:
    # It knows the hosts and users which the run names.
    redactor = Redactor(dict.fromkeys(record.host for record in run.records()))
    redactor.learn(run.study_file.read_text(encoding="utf-8"))
    if run.trace.exists():
        redactor.learn(run.trace.read_text(encoding="utf-8", errors="replace"))
    return redactor


def _files(run: RunFolder, redactor: Redactor | None) -> Iterator[tuple[str, bytes]]:
    # Tables and launch files are left out of a redacted bundle, in which they would start nothing.
    study = run.read_study()
    if study is None:
        raise InputError(f"{run.path} holds no study.toml, which says what the study is about")
    patterns = ("study.toml", "trace/probes.jsonl", *_OF_RUN) if redactor is None else _OF_RUN[:1]
    if redactor is not None:
        yield "study.toml", write_toml(redactor.value(study)).encode()
        if _is_own(run, run.trace):
            records = (record.to_json() for record in read_trace(run.trace).records)
            lines = [json.dumps(redactor.value(strict_json(record))) for record in records]
            yield "trace/probes.jsonl", "".join(f"{line}\n" for line in lines).encode()
        if _is_own(run, plan := run.path / "plan.json"):
            yield "plan.json", json.dumps(redactor.value(json.loads(_read(plan)))).encode()
    for pattern in patterns:
        for path in sorted(run.path.glob(pattern)):
            if _is_own(run, path):
                yield path.relative_to(run.path).as_posix(), _read(path)


def _is_own(run: RunFolder, path: Path) -> bool:
    # By a link, even a folder's, any file of this user's could get into the bundle.
    if not path.is_file():
        return False
    if path.resolve() != run.path.resolve() / path.relative_to(run.path):
        raise InputError(f"{path} is reached by a link, which a bundle does not follow; remove it")
    return True


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{path} is larger than a bundle takes ({MAX_FILE_BYTES // 2**20} MiB)")
    return data


def _unpack(folder: Path, members: Mapping[str, bytes]) -> None:
    # `read_archive` or `_files` have checked the names.
    for name, data in members.items():
        target = folder / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        except OSError as error:
            raise InputError(f"cannot unpack {name}: {error.strerror}") from error


def write_archive(path: Path, members: Mapping[str, bytes]) -> str:
    """Write an archive of content by name, and return its sha256.

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
    write_bytes(path, buffer.getvalue(), mode=0o600)
    return hashlib.sha256(buffer.getvalue()).hexdigest()


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
        name, kind = entry.filename, stat.S_IFMT(entry.external_attr >> 16)
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

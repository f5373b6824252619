"""Bundle of a run: the files that its answer is computed from, and its report, in one zip file.

A redacted bundle is made of a copy of the run in which names and secrets are replaced, so that the
report in it is computed from that copy, too. What is unpacked below a folder of runs is a run like
any other.
"""

from __future__ import annotations

import hashlib
import io
import json
import shlex
import stat
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.deploy.redact import REDACTION, Redactor
from tuner.display.report import render_report
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.data_files import write_toml
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import require_own, write_bytes
from tuner.search_spaces.temporary import TemporaryFolder
from tuner.search_spaces.typed_json import strict_json
from tuner.study.load import result_of
from tuner.workload.records.trace import read_trace

#: Files of a run beside study.toml and its trace; those after the power samples name paths.
_OF_RUN = ("trace/power/*.csv.gz", "plan.json", "table/*", "best/*")
#: Largest file of a run that is packed.
MAX_FILE_BYTES = 256 * 2**20
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the least a zip file can state: equal files make equal archives


@dataclass(frozen=True)
class Bundle:
    """A bundle that was written; by its checksum a reader knows that it is the one sent."""

    path: Path
    sha256: str
    files: int
    redacted: bool

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "to": "bundle", "path": str(self.path), "out": str(self.path)}

    def lines(self) -> list[str]:
        """Return the message to the user."""
        redacted = f"redacted    {REDACTION}; read it before you publish it"
        whole = "contains    host names, paths and arguments; --redact replaces them"
        return [
            f"bundle      {self.path}, {self.files} files",
            redacted if self.redacted else whole,
            f"sha256      {self.sha256}",
            f"open it     unzip {shlex.quote(self.path.name)} -d runs/NAME; tuner show NAME",
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


@contextmanager
def redacted_copy(run: RunFolder) -> Iterator[RunFolder]:
    """Yield a temporary copy of a run in which names and secrets are replaced."""
    with _copied(dict(_files(run, _redactor_of(run))), run.name) as copy:
        yield copy


@contextmanager
def _copied(members: Mapping[str, bytes], name: str) -> Iterator[RunFolder]:
    with TemporaryFolder() as folder:
        _unpack(folder.path / name, members)
        yield RunFolder(folder.path / name)


def _redactor_of(run: RunFolder) -> Redactor:
    # It knows the hosts and users which the run names.
    redactor = Redactor(dict.fromkeys(record.host for record in run.records()))
    redactor.learn(run.study_file.read_text(encoding="utf-8", errors="replace"))
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
            yield "plan.json", json.dumps(redactor.value(_parsed(plan))).encode()
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


def _parsed(path: Path) -> Any:
    try:
        return json.loads(_read(path))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}; remove it, or the run") from error


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{path} is larger than a bundle takes ({MAX_FILE_BYTES // 2**20} MiB)")
    return data


def _unpack(folder: Path, members: Mapping[str, bytes]) -> None:
    for name, data in members.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def write_archive(path: Path, members: Mapping[str, bytes]) -> str:
    """Write a zip file of content by name, and return its sha256."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (stat.S_IFREG | 0o600) << 16
            archive.writestr(entry, data)
    write_bytes(path, buffer.getvalue(), mode=0o600)
    return hashlib.sha256(buffer.getvalue()).hexdigest()

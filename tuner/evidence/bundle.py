"""Bundle of a run: the files that its answer is computed from, and its report, in one file.

A redacted bundle is made of a copy of the run in which names and secrets are replaced, so that the
report in it is computed from that copy, too. A bundle that is opened is a run like any other.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.display.report import render_report
from tuner.evidence.archive import MAX_FILE_BYTES, read_archive, write_archive
from tuner.evidence.redact import REDACTION, Redactor
from tuner.problem.run_folder import RunFolder, write_toml
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import require_own
from tuner.search_spaces.typed import strict_json
from tuner.study.load import result_of
from tuner.workload.node.rights import private_folder
from tuner.workload.trace import read_trace

#: How the names of bundles end.
ENDING = ".bundle.zip"
#: Files of a run beside study.toml and its trace; those after the power samples name paths.
_OF_RUN = ("trace/power/*.csv.gz", "plan.json", "table/*", "best/*")


@dataclass(frozen=True)
class Bundle:
    """A bundle that was written.

    Attributes:
        sha256: checksum of the file, by which a reader knows that it is the one that was sent.
    """

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
    """Write the bundle of a run.

    Args:
        out: the file; RUN.bundle.zip in the current folder by default.
        redact: replace host names, user names, paths, and what looks like a secret
            (`tuner.evidence.redact`).
    """
    out = out or Path(f"{run.name}{ENDING}")
    members = dict(_members(run, _redactor_of(run) if redact else None))
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
    with _copied(dict(_members(run, _redactor_of(run))), run.name) as copy:
        yield copy


@contextmanager
def _copied(members: Mapping[str, bytes], name: str) -> Iterator[RunFolder]:
    with tempfile.TemporaryDirectory(prefix="joulefront-bundle-") as folder:
        _unpack(Path(folder) / name, members)
        yield RunFolder(Path(folder) / name)


def _redactor_of(run: RunFolder) -> Redactor:
    """Return a redactor that knows the hosts and users which the run names."""
    records = run.records()
    redactor = Redactor(dict.fromkeys(record.host for record in records))
    redactor.learn(run.study_file.read_text(encoding="utf-8"))
    if run.trace.exists():
        redactor.learn(run.trace.read_text(encoding="utf-8", errors="replace"))
    return redactor


def _members(run: RunFolder, redactor: Redactor | None) -> Iterator[tuple[str, bytes]]:
    """Yield the files of the run by name.

    Tables and launch files are left out of a redacted bundle, in which they would start nothing.
    """
    study = run.read_study()
    if study is None:
        raise InputError(f"{run.path} holds no study.toml, which says what the study is about")
    patterns: tuple[str, ...] = _OF_RUN[:1]
    if redactor is None:
        patterns = ("study.toml", "trace/probes.jsonl", *_OF_RUN)
    else:
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
    """Return True if this file is there, and no link leads to it, not even a folder's.

    Raises:
        InputError: a link does, by which any file of this user's could get into the bundle.
    """
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
    """Write files into a new folder; `read_archive` or `_members` have checked their names."""
    for name, data in members.items():
        target = folder / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        except OSError as error:
            raise InputError(f"cannot unpack {name}: {error.strerror}") from error

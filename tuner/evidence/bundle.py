"""Evidence bundle of a run: what it measured, what it answers, and on what, in one file.

The bundle holds the trace, the study's specification, report and answer, a one-page summary, and
the facts of the machine that makes it, each with its checksum. It is made of a copy of the run, so
that everything in it, the report included, is computed from what is in it.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tuner.display.report import render_report
from tuner.evidence.answer import answer_of
from tuner.evidence.archive import MAX_FILE_BYTES, write_archive
from tuner.evidence.redact import REDACTION, Redactor
from tuner.evidence.summary import summary_page
from tuner.problem.run_folder import RunFolder, write_toml
from tuner.results.wall import WALL_FILE, last_wall_check
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import require_own
from tuner.search_spaces.typed import strict_json
from tuner.study.load import result_of
from tuner.workload.node.machine_facts import machine_facts
from tuner.workload.trace import read_trace

__all__ = ["ENDING", "MANIFEST", "SCHEMA", "Bundle", "make_bundle", "redacted_copy", "release"]

#: Version of bundle.json. A reader takes this one and older ones.
SCHEMA = 1
MANIFEST = "bundle.json"
#: How the names of bundles end.
ENDING = ".evidence.zip"
#: Files of a run that its answer is computed from, or that show its power over time.
_OF_RUN = ("trace/power/*.csv.gz", WALL_FILE, "table/*", "best/*")


@dataclass(frozen=True)
class Bundle:
    """A bundle that was written.

    Attributes:
        path: the file.
        sha256: its checksum, by which a reader knows that it is the one that was sent.
        files: number of files in it.
        redacted: whether names and secrets were replaced.
    """

    path: Path
    sha256: str
    files: int
    redacted: bool

    def to_json(self) -> dict[str, Any]:
        """Return the bundle as JSON values."""
        return {**vars(self), "path": str(self.path)}

    def lines(self) -> list[str]:
        """Return what to tell the user."""
        lines = [
            f"bundle      {self.path}, {self.files} files",
            f"sha256      {self.sha256}",
            f"open it     tuner open {self.path.name}",
        ]
        if self.redacted:
            lines.insert(1, f"redacted    {REDACTION}; read it before you publish it")
        else:
            lines.insert(1, "contains    host names, paths and arguments; --redact replaces them")
        return lines


def release() -> str:
    """Return the installed release of joulefront."""
    try:
        return version("joulefront")
    except PackageNotFoundError:
        return "(not installed)"


def make_bundle(
    run: RunFolder, out: Path | None = None, *, redact: bool = False, facts: Any = None
) -> Bundle:
    """Write the evidence bundle of a run.

    Args:
        run: the run.
        out: the file; RUN.evidence.zip in the current folder by default.
        redact: replace host names, user names, paths, and what looks like a secret
            (`tuner.evidence.redact`).
        facts: of this machine, as JSON values; asked for by default.

    Raises:
        InputError: the run cannot be read or has no trace, or a file is too large.
        OSError: the bundle cannot be written.
    """
    if not run.trace.is_file():
        raise InputError(f"{run.name} has no trace, so there is nothing to prove anything by")
    out = out or Path(f"{run.name}{ENDING}")
    redactor = redactor_of(run) if redact else None
    members = dict(_members(run, redactor))
    facts = machine_facts().to_json() if facts is None else facts
    host = platform.node()
    if redactor is not None:
        facts, host = redactor.value(facts), redactor.text(host)
    members["doctor.json"] = _json(facts)
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="joulefront-bundle-") as name:
        copy = _copy(members, Path(name) / run.name)
        result = result_of(copy)
        records = read_trace(copy.trace).records
        members["report.html"] = render_report(result, records=records).encode()
        members["summary.html"] = summary_page(
            result,
            records,
            made_at=made_at,
            host=host,
            release=release(),
            wall=last_wall_check(copy.path),
        ).encode()
        answer = answer_of(result)
        data = {**result.to_json(), "run_dir": None, "report": None}
        members["result.json"] = _json(redactor.value(strict_json(data)) if redactor else data)
    manifest = {
        "schema": SCHEMA,
        "run": run.name,
        "made_at": made_at,
        "joulefront": release(),
        "host": host,
        "redacted": redact,
        "answer": answer,
        "files": {
            path: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for path, data in members.items()
        },
    }
    if out.parent.resolve().is_relative_to(run.path.resolve()):
        require_own(run.path)
    digest = write_archive(out, {MANIFEST: _json(manifest), **members})
    return Bundle(out, digest, len(members) + 1, redact)


def _json(data: Any) -> bytes:
    text = json.dumps(strict_json(data), indent=1, sort_keys=True, default=str, ensure_ascii=False)
    return f"{text}\n".encode()


@contextmanager
def redacted_copy(run: RunFolder) -> Iterator[RunFolder]:
    """Yield a temporary copy of a run in which names and secrets are replaced."""
    with tempfile.TemporaryDirectory(prefix="joulefront-redacted-") as name:
        yield _copy(dict(_members(run, redactor_of(run))), Path(name) / run.name)


def _copy(members: Mapping[str, bytes], folder: Path) -> RunFolder:
    for path, data in members.items():
        if path.startswith("run/"):
            target = folder / path.removeprefix("run/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    return RunFolder(folder)


def redactor_of(run: RunFolder) -> Redactor:
    """Return a redactor that knows the hosts and users which the run names."""
    hosts = dict.fromkeys(record.host for record in read_trace(run.trace).records)
    redactor = Redactor(hosts)
    redactor.learn(run.study_file.read_text(encoding="utf-8"))
    redactor.learn(run.trace.read_text(encoding="utf-8", errors="replace"))
    return redactor


def _members(run: RunFolder, redactor: Redactor | None) -> Iterator[tuple[str, bytes]]:
    """Yield the files of the run, as the bundle holds them.

    Launch files are left out of a redacted bundle, in which they would start nothing.
    """
    study = run.read_study()
    if study is None:
        raise InputError(f"{run.path} holds no study.toml, which says what the study is about")
    if redactor is None:
        yield "run/study.toml", _read(run.study_file)
        yield "run/trace/probes.jsonl", _read(run.trace)
    else:
        yield "run/study.toml", write_toml(redactor.value(study)).encode()
        records = (record.to_json() for record in read_trace(run.trace).records)
        lines = [json.dumps(redactor.value(strict_json(record))) for record in records]
        yield "run/trace/probes.jsonl", "".join(f"{line}\n" for line in lines).encode()
    for pattern in _OF_RUN:
        if redactor is not None and pattern in ("table/*", "best/*"):
            continue
        for path in sorted(run.path.glob(pattern)):
            if path.is_file() and not path.is_symlink():
                yield f"run/{path.relative_to(run.path).as_posix()}", _read(path)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{path} is larger than a bundle takes ({MAX_FILE_BYTES // 2**20} MiB)")
    return data

"""A run as one zip file: the files that its answer is computed from, and its report.

`tuner show FILE.zip` reads it (`tuner.problem.archive`), and unpacked it is a run like any other. A
redacted one is made of a copy of the run in which names and secrets are replaced, so that its
report is computed from that copy, too.
"""

from __future__ import annotations

import hashlib
import io
import json
import stat
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tuner.display.report import render_report
from tuner.exchange.redact import Redactor
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.data_files import write_toml
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import TemporaryFolder, archive_of, require_own, write_bytes
from tuner.search_spaces.typed_json import strict_json
from tuner.study.load import result_of
from tuner.workload.records.trace import read_trace

#: Files of a run beside study.toml and its trace; those after the power samples name paths.
_OF_RUN = ("trace/power/*.csv.gz", "plan.json", "table/*", "best/*")
#: Largest file of a run that is packed.
MAX_FILE_BYTES = 256 * 2**20
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the least a zip file can state: equal files make equal archives


def write_zip(run: RunFolder, out: Path | None = None, *, redact: bool = False) -> dict[str, Any]:
    """Write a run to a zip file, RUN.zip in the current folder by default; return its path, its
    sha256 and the number of its files as JSON values.
    """
    out = out or Path(f"{run.name}.zip")
    if archive_of(run.path) == out.resolve():  # with the logs that another zip file leaves out
        raise InputError(f"{out} is the run that is exported; name another file with --out")
    members = dict(_files(run, _redactor_of(run) if redact else None))
    with _copied(members, run.name) as copy:
        records = copy.records()
        members["report.html"] = render_report(result_of(copy), records=records).encode()
    if out.parent.resolve().is_relative_to(run.path.resolve()):
        require_own(run.path)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo(f"{run.name}/{name}", _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (stat.S_IFREG | 0o600) << 16
            archive.writestr(entry, data)
    write_bytes(out, buffer.getvalue(), mode=0o600)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    return {"out": str(out), "sha256": digest, "files": len(members)}


@contextmanager
def redacted_copy(run: RunFolder) -> Iterator[RunFolder]:
    """Yield a temporary copy of a run in which names and secrets are replaced."""
    with _copied(dict(_files(run, _redactor_of(run))), run.name) as copy:
        yield copy


@contextmanager
def _copied(members: Mapping[str, bytes], name: str) -> Iterator[RunFolder]:
    with TemporaryFolder() as folder:
        for member, data in members.items():
            target = folder.path / name / member
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        yield RunFolder(folder.path / name)


def _redactor_of(run: RunFolder) -> Redactor:
    # It knows the hosts and users which the run names.
    redactor = Redactor(dict.fromkeys(record.host for record in run.records()))
    for file in (run.study_file, run.trace):
        if file.exists():
            redactor.learn(file.read_text(encoding="utf-8", errors="replace"))
    return redactor


def _files(run: RunFolder, redactor: Redactor | None) -> Iterator[tuple[str, bytes]]:
    # Tables and launch files are left out of a redacted copy, in which they would start nothing.
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
    # By a link, even a folder's, any file of this user's could get into the zip file.
    if not path.is_file():
        return False
    if path.resolve() != run.path.resolve() / path.relative_to(run.path):
        raise InputError(f"{path} is reached by a link, which is not followed; remove it")
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
        raise InputError(f"{path} is larger than the limit ({MAX_FILE_BYTES // 2**20} MiB)")
    return data

"""A bundle that is opened: unpacked as a run of one's own, checked, and answered again."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tuner.display.report import write_report
from tuner.evidence.answer import answer_of, differences
from tuner.evidence.archive import read_archive
from tuner.evidence.bundle import MANIFEST, SCHEMA
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import require_own
from tuner.study.load import result_of
from tuner.workload.node.rights import private_folder
from tuner.workload.trace import read_trace

__all__ = ["Opened", "open_bundle"]

#: Folder in the run for what the bundle's maker computed: report, summary, answer, doctor.
MADE = "evidence"


@dataclass(frozen=True)
class Opened:
    """A bundle that was opened, and what the check of it found.

    Attributes:
        run: the folder of the run that it became.
        sha256: of the bundle.
        made_at, made_by, host: when, by which release and where it was made, as it states.
        redacted: whether names were replaced in it.
        files: number of files.
        changed: files whose content is not what the bundle states.
        differences: sentences on what the answer computed here differs in.
        largest: largest relative difference of a figure of time or energy.
        headline: the recommendation, computed here.
    """

    run: Path
    sha256: str
    made_at: str
    made_by: str
    host: str
    redacted: bool
    files: int
    changed: tuple[str, ...]
    differences: tuple[str, ...]
    largest: float
    headline: str

    @property
    def sound(self) -> bool:
        """True if nothing was changed and the answer is the same here."""
        return not self.changed and not self.differences

    def to_json(self) -> dict[str, Any]:
        """Return the findings as JSON values."""
        return {**asdict(self), "run": str(self.run), "sound": self.sound}

    def lines(self) -> list[str]:
        """Return what to tell the user."""
        redacted = ", names and secrets replaced" if self.redacted else ""
        changed = f"CHANGED: {', '.join(self.changed)}" if self.changed else "all as stated"
        same = f"the same here, figures within {100 * self.largest:.2g} %"
        lines = [
            f"made        {self.made_at} by joulefront {self.made_by} on {self.host}{redacted}",
            f"sha256      {self.sha256}",
            f"checksums   {self.files} files: {changed}",
            f"answer      {'DIFFERENT here' if self.differences else same}",
            *(f"            {sentence}" for sentence in self.differences),
            f"headline    {self.headline}",
            f"run         {self.run} (the maker's report: {MADE}/summary.html, {MADE}/report.html)",
            f"next        tuner front {self.run.name}, tuner replay {self.run}",
        ]
        return lines


def open_bundle(
    path: str | Path, *, runs_dir: str | Path = "runs", name: str | None = None
) -> Opened:
    """Unpack a bundle into a new run, check its files, and compute its answer again.

    The run's report is written anew here; the maker's own files are in the run's folder
    `evidence`.

    Args:
        path: the bundle.
        runs_dir: folder of the runs.
        name: name of the new run; the bundle's by default.

    Raises:
        InputError: it is no bundle, exceeds a limit, or its run cannot be read; or there is a run
            of this name.
    """
    path = Path(path)
    members = read_archive(path)
    manifest = _manifest(path, members)
    run = RunFolder.named(runs_dir, name or str(manifest.get("run")))
    if run.path.exists():
        raise InputError(f"{run.path} exists; open the bundle under another name: --name NAME")
    stated = manifest["files"]
    changed = sorted(
        {name for name in {*members, *stated} - {MANIFEST} if not _as_stated(name, members, stated)}
    )
    Path(runs_dir).mkdir(parents=True, exist_ok=True)
    require_own(run.path)
    draft = Path(tempfile.mkdtemp(prefix=".joulefront-open-", dir=runs_dir))
    try:
        _unpack(draft, members)
        copy = RunFolder(draft)
        result = replace(result_of(copy), name=run.name)
        write_report(result, copy.report, records=read_trace(copy.trace).records)
        draft.rename(run.path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    private_folder(run.path)
    found, largest = differences(manifest["answer"], answer_of(result))
    return Opened(
        run=run.path,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        made_at=str(manifest.get("made_at", "at an unknown time"))[:40],
        made_by=str(manifest.get("joulefront", "of an unknown release"))[:40],
        host=str(manifest.get("host", "an unknown host"))[:100],
        redacted=manifest.get("redacted") is True,
        files=len(members),
        changed=tuple(changed),
        differences=tuple(found),
        largest=largest,
        headline=result.recommendation.headline if result.recommendation else "nothing measured",
    )


def _manifest(path: Path, members: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        manifest = json.loads(members[MANIFEST])
    except KeyError:
        raise InputError(f"{path} is no bundle: it holds no {MANIFEST}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {MANIFEST} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or type(manifest.get("schema")) is not int:
        raise InputError(f"{path}: {MANIFEST} states no schema")
    if manifest["schema"] > SCHEMA:
        raise InputError(
            f"{path} has schema {manifest['schema']}, and this release reads {SCHEMA} and older; a "
            "newer joulefront wrote it"
        )
    for part in ("files", "answer"):
        if not isinstance(manifest.get(part), dict):
            raise InputError(f"{path}: {part} in {MANIFEST} must be an object")
    return manifest


def _as_stated(name: str, members: Mapping[str, bytes], stated: Mapping[str, Any]) -> bool:
    entry = stated.get(name)
    if name not in members or not isinstance(entry, Mapping):
        return False
    return bool(entry.get("sha256") == hashlib.sha256(members[name]).hexdigest())


def _unpack(folder: Path, members: Mapping[str, bytes]) -> None:
    """Write the run's files into a folder that is empty and its owner's alone.

    The names were checked by `read_archive`; links cannot be in the way in a new folder.
    """
    for name, data in members.items():
        inside = name.removeprefix("run/") if name.startswith("run/") else f"{MADE}/{name}"
        target = folder / inside
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        except OSError as error:
            raise InputError(f"cannot unpack {name}: {error.strerror}") from error
    if not re.search(rb"\S", members.get("run/study.toml", b"")):
        raise InputError("the bundle holds no run: run/study.toml is missing or empty")

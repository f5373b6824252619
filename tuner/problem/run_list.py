"""The runs of a folder: list, remove, stop."""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from tuner.problem.run_folder import RunFolder, find_run
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.safe_files import require_own, write_text

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

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        return asdict(self)


def list_runs(runs_dir: str | Path) -> list[RunEntry]:
    """Return the runs of a folder, the latest first."""
    folders = [path.parent for path in Path(runs_dir).glob("*/study.toml")]
    folders.sort(key=lambda path: (path / "study.toml").stat().st_mtime, reverse=True)
    return [_entry(RunFolder(path)) for path in folders]


def _entry(folder: RunFolder) -> RunEntry:
    size = sum(p.lstat().st_size for p in folder.path.rglob("*") if not p.is_dir())
    changed = datetime.fromtimestamp(folder.study_file.stat().st_mtime)
    stamp = changed.isoformat(sep=" ", timespec="minutes")
    try:
        study = folder.read_study() or {}
        records = folder.records()
    except InputError:
        return RunEntry(folder.path.name, "", "", "unknown", "unreadable", 0, stamp, size)
    recorded = study.get("recorded", {})
    kind: Kind = "measured" if records else "unknown"
    if recorded:
        kind = "recording"
    elif "plan" in study or (records and records[0].meter.is_simulated):
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
        fd = os.open(folder.path / ".lock", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _own_idle(runs_dir: str | Path, name: str) -> RunFolder:
    known = {path.parent.name: path.parent for path in Path(runs_dir).glob("*/study.toml")}
    if name not in known:
        raise UnknownName("run", name, known, where=f" in {Path(runs_dir).resolve()}")
    folder = RunFolder(known[name])
    require_own(folder.path)
    if folder.path.is_symlink():
        raise InputError(f"{folder.path} is a link; remove the link or the folder it leads to")
    if _is_held(folder):
        raise InputError(f"the run {name!r} is being run; wait until it ends, or interrupt it")
    return folder


def remove_run(runs_dir: str | Path, name: str) -> Path:
    """Delete a run with everything that it measured; return its folder."""
    folder = _own_idle(runs_dir, name)
    shutil.rmtree(folder.path)
    return folder.path

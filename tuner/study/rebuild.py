"""`tuner runs rebuild`: the study made again from the trace.

The trace is the truth and the study its index, so a journal that was lost or damaged, or a database
that was, costs nothing: every trial is asked and told again from the records. A journal is built
aside and takes the old one's place in one step; in a database what the study lacks is told and
nothing is taken away.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.problem.batch_scaling import in_job_steps
from tuner.problem.from_recording import recorded_problem
from tuner.problem.problem import Problem, digest_of
from tuner.problem.run_folder import RunFolder
from tuner.search.optuna_samplers import make_sampler
from tuner.search_spaces.errors import InputError
from tuner.storage import open_storage, without_password
from tuner.study.load import load_spec
from tuner.study.recorder import StudyRecorder, new_driver_id
from tuner.workload.trace import read_trace, repair_torn_tail


@dataclass(frozen=True)
class Rebuilt:
    """Contents of a rebuilt study.

    Attributes:
        where: the study's journal, or its storage's URL without a password.
        probes: records of the trace.
        measurements: windows that they hold.
        notes: what was done and found, one sentence each.
    """

    run: Path
    where: str
    probes: int
    measurements: int
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return {**vars(self), "run": str(self.run), "notes": list(self.notes)}

    def lines(self) -> list[str]:
        """Return the outcome as lines."""
        return [
            f"{self.where} holds the study of {self.probes} probes and {self.measurements} "
            "measurements",
            *self.notes,
        ]


def rebuild(run: RunFolder, *, storage: str | None = None) -> Rebuilt:
    """Make the study of a run again from its trace.

    Args:
        storage: URL of the database that is to hold it; the journal in the run folder when not
            given.

    Raises:
        InputError: there is no trace, it or study.toml cannot be read, a driver is running the
            study, or the storage does not answer.
    """
    with run.locked():
        notes = list(repair_torn_tail(run.trace))
        records = read_trace(run.trace).records
        if not records:
            raise InputError(
                f"the trace {run.trace} holds no probe, so there is nothing to rebuild"
            )
        spec = load_spec(run, records)
        problem, whole = _problem_again(spec.problem)
        identity = str(problem.identity.get("space", {}).get("digest", ""))
        if not whole:
            identity = f"{identity} (probed configurations only)"
            notes.append(
                "what could be searched cannot be enumerated again as it was, so the study holds "
                "the probed configurations alone; it can be looked at, and to go on searching, "
                f"remove {run.journal.name} first"
            )
        draft = run.path / "study.journal.new"
        draft.unlink(missing_ok=True)
        recorder = StudyRecorder(
            name=run.name,
            storage=open_storage(storage, draft),
            sampler=make_sampler(None, problem.candidates),
            steps=problem.steps,
            constraints=spec.constraints,
            driver=(spec.driver or new_driver_id()) if storage else None,
            identity=identity,
        )
        notes += recorder.catch_up([in_job_steps(record, problem.job) for record in records])
        where = without_password(storage) if storage else str(run.journal)
        if storage is None:
            _replace_journal(draft, run.journal)
    windows = sum(len(record.measurements) for record in records)
    return Rebuilt(run.path, where, len(records), windows, tuple(notes))


def _replace_journal(draft: Path, journal: Path) -> None:
    """Put the new journal where the old one was, which stays beside it as study.journal.old."""
    if journal.exists():
        os.replace(journal, journal.with_name("study.journal.old"))
    os.replace(draft, journal)
    for lock in draft.parent.glob(f"{draft.name}.lock*"):
        lock.unlink()


def _problem_again(problem: Problem) -> tuple[Problem, bool]:
    """Return the problem of a run, and whether its candidates are all that were searched.

    A machine without a compiler, a changed space file or a moved table give other candidates than
    the study had; the digest of the space tells.
    """
    digest = problem.identity.get("space", {}).get("digest")
    if digest_of(problem.candidates) == digest:
        return problem, True
    trace = problem.identity.get("recorded", {}).get("trace")
    if isinstance(trace, str):
        with contextlib.suppress(InputError, OSError):
            again, _ = recorded_problem(trace, steps=problem.steps)
            if digest_of(again.candidates) == digest:
                return replace(again, identity=problem.identity), True
    return problem, False

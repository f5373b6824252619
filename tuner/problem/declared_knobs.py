"""Declared knobs of a study: which are searched, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

from tuner.search_spaces.declared import Knob, check_knobs, fixed, parse_knob
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.knob_packs import load_pack
from tuner.workload.declared_knobs import program_knobs
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.script_job import ScriptJob


@overload
def with_knobs(job: Script, knobs: Sequence[Knob | str]) -> Script: ...
@overload
def with_knobs(
    job: TrainingJob | str | Path | None, knobs: Sequence[Knob | str]
) -> TrainingJob: ...
def with_knobs(
    job: TrainingJob | Script | str | Path | None, knobs: Sequence[Knob | str]
) -> TrainingJob | Script:
    """Return a job or a script with more declared knobs.

    Args:
        knobs: knobs, declarations such as "compile=false,true", names of packs, or paths of their
            files. A knob of a pack gives way to one of the same name that is not of a pack.
    """
    if not isinstance(job, TrainingJob | Script):
        job = load_job(job)
    if not knobs:
        return job
    own: list[Knob] = []
    packed: list[Knob] = []
    for given in knobs:
        if isinstance(given, Knob):
            own.append(given)
        elif "=" in given:
            own.append(parse_knob(given))
        elif given == "framework" and isinstance(job, Script):
            packed += job.framework_knobs
        else:
            packed += load_pack(given).knobs
    own = [*job.knobs, *own]
    names = {knob.name for knob in own}
    every = [*own, *(knob for knob in packed if knob.name not in names)]
    return replace(job, knobs=check_knobs(every))


def searched_knobs(
    job: TrainingJob, plan: bool, allow_changed_training: bool
) -> tuple[TrainingJob, list[str]]:
    """Return the job with the declared knobs that are searched, and notes on them."""
    if not job.knobs:
        return job, []
    knobs = job.knobs if isinstance(job, ScriptJob) else program_knobs(check_knobs(job.knobs))
    if plan:
        names = ", ".join(knob.name for knob in knobs)
        note = f"declared knobs stay at today's values, because no model knows them: {names}"
        return replace(job, knobs=fixed(knobs)), [note]
    kept = [k for k in knobs if allow_changed_training or not k.changes_training]
    left = [k for k in knobs if k not in kept]
    notes = []
    if kept:
        described = "; ".join(_described(knob) for knob in kept)
        notes.append(f"declared knobs in play, of which no model predicts anything: {described}")
    if left:
        names = ", ".join(knob.name for knob in left)
        notes.append(
            f"declared knobs that stay at today's values, because they change what is learnt: "
            f"{names} (--allow-changed-training searches them)"
        )
    stay = {knob.name for knob in left}
    both = [k for knob in knobs for k in (fixed([knob]) if knob.name in stay else (knob,))]
    return replace(job, knobs=check_knobs(both)), notes


def _described(knob: Knob) -> str:
    levels = ", ".join("not set" if level is None else str(level) for level in knob.levels)
    how = f" by {knob.how}" if ":" in knob.how else ""
    if knob.live:
        confirmed = "" if knob.by_script or knob.read else ", which nothing reads back"
        how = f" live, by {'the script' if knob.by_script else 'a command'}{confirmed}"
    return f"{knob.name} ({levels}){how}" + (f" where {knob.when}" if knob.when else "")

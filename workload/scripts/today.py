"""Today's batches of an inspected script, and where each value comes from.

The order of trust: what the command says, what an engine or framework was told, what the first
steps showed. Sources that contradict each other make a value unknown, or are refused where the user
is one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.hook import micro_batches
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.evidence import Counted, batches_seen
from tuner.workload.scripts.script_facts import Framework
from tuner.workload.scripts.script_job import ScriptJob


@dataclass(frozen=True)
class Today:
    """What a script trains today, 0 if unknown; `driver_holds` if its driver agrees."""

    global_batch: int
    frame: Framework
    driver_holds: bool = True
    notes: tuple[str, ...] = ()


def seen_today(script: Script, blank: ScriptJob, facts: Mapping[str, Any]) -> Today:
    """Return what a script trains today; InputError if the user says otherwise."""
    placed = "deepspeed_config" in blank.placeholders
    config = blank.file_config or ({} if placed else facts.get("config", {}))
    if "micro_batch" in facts:
        return _of_engine(script, blank, facts, config)
    return _of_steps(script, blank, facts, config)


def _of_engine(
    script: Script, blank: ScriptJob, facts: Mapping[str, Any], config: Mapping[str, Any]
) -> Today:
    micro, times = micro_batches(config, blank.devices // int(facts.get("stages", 1)))
    if not micro:
        micro, times = facts["micro_batch"], facts["accumulation"]
    whole, batch = int(facts["global_batch"]), facts.get("batch") or []
    if script.global_batch not in (None, whole):
        raise InputError(
            f"--global-batch is {script.global_batch}, but DeepSpeed runs the script "
            f"{script.name!r} at {whole}"
        )
    altered = facts["micro_batch"] != micro
    follows = altered and bool(batch) and batch[0] == facts["micro_batch"]
    follows = (follows or bool(facts.get("training_data"))) and not facts.get("owner")
    sources = dict.fromkeys(("micro_batch", "accumulation"), "DeepSpeed's engine")
    frame = Framework(
        config=config, micro_batch=micro, accumulation=times, follows=follows, sources=sources
    )
    return Today(whole, frame)


def _of_steps(
    script: Script, blank: ScriptJob, facts: Mapping[str, Any], config: Mapping[str, Any]
) -> Today:
    counted, owned = batches_seen(facts), facts.get("owned", {})
    notes, driven = [], blank.driven
    holds = driven is None or not _contradicts(driven.batches, owned, counted)
    if not holds:
        assert blank.driver is not None
        notes.append(f"{blank.driver.title} trains other batches than its keys say, so they stay")
    told = _told_by_command(blank, holds=holds)
    _require_agreement(told, counted)
    by_owner = {
        "micro_batch": int(owned.get("micro_batch") or 0),
        "accumulation": int(owned.get("gradient_accumulation") or 0),
    }
    by_steps = {"micro_batch": counted.micro_batch, "accumulation": counted.accumulation}
    showed = f"{counted.steps} step{'s' * (counted.steps != 1)}: {counted.how}"
    values, sources = dict[str, int](), dict[str, str]()
    for name, seen in by_steps.items():
        if told.get(name):
            values[name], sources[name] = told[name], "the command"
        elif by_owner[name] and seen and by_owner[name] != seen:
            notes.append(
                f"{facts.get('owner') or 'the framework'} was told {name.replace('_', ' ')} "
                f"{by_owner[name]}, and the first steps took {seen}"
            )
        elif by_owner[name]:
            values[name], sources[name] = by_owner[name], f"{facts.get('owner')}'s arguments"
        elif seen:
            values[name], sources[name] = seen, showed
    micro, times = values.get("micro_batch", 0), values.get("accumulation", 0)
    whole = micro * times * blank.baseline.data_parallel
    if script.global_batch is not None:
        whole = _require_global(script, blank, micro, times)
        share = whole // blank.baseline.data_parallel
        if micro and not times:
            times, sources["accumulation"] = share // micro, "--global-batch"
        elif times and not micro:
            micro, sources["micro_batch"] = share // times, "--global-batch"
    elif whole and _all_read_the_same(blank, facts):
        whole = 0
        notes.append(
            f"all {blank.devices} ranks drew the same samples first (no DistributedSampler?), so "
            "the global batch is not known (--global-batch N tells it)"
        )
    elif not whole:
        notes.append(
            f"the global batch is not known (--global-batch N tells it): {counted.how or 'unseen'}"
        )
    agree = bool(counted.steps) and (micro, times) == (counted.micro_batch, counted.accumulation)
    frame = Framework(
        config=config, micro_batch=micro, accumulation=times, counted=agree, sources=sources
    )
    return Today(whole, frame, holds, tuple(notes))


def _told_by_command(blank: ScriptJob, *, holds: bool) -> dict[str, int]:
    named = {"micro_batch": "micro_batch", "accumulation": "gradient_accumulation"}
    said = {"micro_batch": blank.frame.micro_batch, "accumulation": blank.frame.accumulation}
    if holds and blank.driven is not None and all(blank.driven.batches):
        return said
    return {name: said[name] for name, placed in named.items() if placed in blank.placeholders}


def _contradicts(keys: tuple[int, int], owned: Mapping[str, Any], counted: Counted) -> bool:
    found = (
        int(owned.get("micro_batch") or counted.micro_batch),
        int(owned.get("gradient_accumulation") or counted.accumulation),
    )
    return any(key and seen and key != seen for key, seen in zip(keys, found, strict=True))


def _require_agreement(told: Mapping[str, int], counted: Counted) -> None:
    seen = {"micro_batch": counted.micro_batch, "accumulation": counted.accumulation}
    for name, value in told.items():
        if value and seen[name] and value != seen[name]:
            placed = {"micro_batch": name, "accumulation": "gradient_accumulation"}[name]
            raise InputError(
                f"the command says {placed} {value}, but {counted.steps} steps showed "
                f"{counted.micro_batch} samples x {counted.accumulation} backward passes on each "
                f"rank ({counted.how}); write {{{placed}={seen[name]}}}, or leave the placeholder "
                "out if the argument means something else"
            )


def _require_global(script: Script, blank: ScriptJob, micro: int, times: int) -> int:
    whole, replicas = script.global_batch, blank.baseline.data_parallel
    assert whole is not None
    seen = replicas * micro * times
    if (seen and seen != whole) or whole % (replicas * (micro or 1) * (times or 1)):
        told = f"{replicas} x {micro or '?'} x {times or '?'}"
        raise InputError(
            f"--global-batch is {whole}, but the script {script.name!r} trains {told}"
            f"{f' = {seen}' if seen else ''} samples a step"
        )
    return whole


def _all_read_the_same(blank: ScriptJob, facts: Mapping[str, Any]) -> bool:
    digests = facts.get("first_batches", ())
    known = None not in digests and len(digests) == blank.devices
    return known and blank.baseline.data_parallel > 1 and len({*digests}) == 1

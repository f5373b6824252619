"""Knobs of a user's script: the search space that they leave, and sentences about the others.

The *frame* that a script trains in (DeepSpeed, transformers' Trainer, Accelerate, Lightning, a
plain torch loop) decides: it may own the batches, the accumulation, the optimizer and the model.
A knob without evidence of one inspected launch is not offered, and the user gets the reason.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tuner.search_spaces.knobs import KNOBS, Value
from tuner.search_spaces.space import Auto, SearchSpace
from tuner.workload.scripts.routes.batch_split import NO_BATCH
from tuner.workload.scripts.script_facts import LAUNCH
from tuner.workload.scripts.supported_script import SupportedScript


def knob_sentences(job: SupportedScript, searched: Collection[str] = LAUNCH) -> tuple[str, ...]:
    """Describe the knobs in play and the reasons against the rest, one sentence each."""
    able = [name for name in LAUNCH if job.offers[name].turned]
    turned = [name for name in able if name in searched] + [knob.name for knob in job.knobs]
    left = [name for name in able if name not in searched]
    sentences = [
        f"the script {job.name!r} trains by {_trainer(job)}; in play: "
        f"{', '.join(turned) or 'no launch knob'}, and live settings where the machine lets "
        "them be set"
    ]
    if left:
        sentences.append(f"not in this search space: {', '.join(left)}")
    if others := _undeclared(job):
        sentences.append(f"{others} (--knobs framework)")
    for why, names in _reasons(job, LAUNCH).items():
        sentences.append(f"not in play: {', '.join(names)}: {why}")
    return (*sentences, *job.assumed)


def _trainer(job: SupportedScript) -> str:
    counted = {"torch": "a torch optimizer", "program": "steps of its own"}
    by = counted.get(job.frame.kind, "DeepSpeed")
    by = f"{job.frame.owner} over {by}" if job.frame.owner else by
    return f"{by}, recognised as {job.driver.title}" if job.driver else by


def _undeclared(job: SupportedScript) -> str:
    if job.driver is None:
        return ""
    own, driver = {knob.name for knob in job.knobs}, job.driver.driver
    others = [name for name in driver.declared if name not in own]
    return f"{driver.name} also has {', '.join(others)}" if others else ""


def _reasons(job: SupportedScript, names: Collection[str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for name in names:
        if not job.offers[name].turned:
            reasons.setdefault(job.offers[name].why, []).append(name)
    return reasons


def why_nothing(job: SupportedScript) -> tuple[str, ...]:
    """Return why none of the knobs that split the batch can be turned, a sentence each."""
    reasons = _reasons(job, ("micro_batch", "data_parallel"))
    stay = [f"{' and '.join(names)}: {why}" for why, names in reasons.items() if why != NO_BATCH]
    return (*stay, *(note for note in job.assumed if "predicted before" not in note))


def restrict_space(space: SearchSpace, job: SupportedScript) -> SearchSpace:
    """Return the space with knobs that a script cannot set fixed at present values."""
    choices: dict[str, tuple[Value, ...] | Auto] = {}
    for name in KNOBS:
        choice = space.choices.get(name)
        if name == "sharding" and choice is None and _shards_otherwise(job, space):
            choice = job.offers[name].values
        if name == "global_batch":
            continue
        kept = _choice_of(job, name, choice) if name in job.offers else choice
        if kept is not None:
            choices[name] = kept
    return replace(space, choices=choices)


def _choice_of(
    job: SupportedScript, name: str, choice: tuple[Value, ...] | Auto | None
) -> tuple[Value, ...] | Auto | None:
    offer, today, default = job.offers[name], job.baseline.get(name), KNOBS[name].default
    assert today is not None  # every launch knob has a default
    if choice is None or not offer.turned or choice == Auto(kind="baseline"):
        if today == default or default is None:
            return None
        # A knob that the space does not name stands at its default, or as today.
        can = choice is None and offer.turned and default in (offer.values or (default,))
        return (default, today) if can else (today,)
    if isinstance(choice, tuple):
        kept = [value for value in choice if not offer.values or value in offer.values]
        return (*kept, today)
    return (*offer.values, today) if offer.values else choice


def _shards_otherwise(job: SupportedScript, space: SearchSpace) -> bool:
    stages = space.choices.get("zero_stage")
    searched = isinstance(stages, tuple) and len(stages) > 1
    return searched and job.driven is not None and "sharding" in job.driven.today

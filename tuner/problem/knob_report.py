"""Knobs that a search of the built-in training program varies, and reasons to leave the others.

If the front has no tensor parallelism, the user should know whether it lost, was refused or was
not in the space. So each launch knob is either varied, or named with its reason: the space does not
name it, or the rule that refuses all its other values here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tuner.models.prior import prior_of, unpredicted_knobs
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.rules import broken_rules, unrunnable
from tuner.search_spaces.space import SearchSpace

#: Knobs outside of a space that its sentence names: the parallel degrees, which most jobs would
#: try first; `tuner list spaces` lists every one.
NAMED_ABSENT = 4
#: Why a knob that changes what is learnt is not searched.
CHANGES = "it changes what is learnt (--allow-changed-training searches it)"


def knobs_in_play(
    candidates: Candidates, space: SearchSpace, job: TrainingJob, cluster: Cluster
) -> tuple[str, ...]:
    """Return lines on the knobs that are searched, left out, or fixed by a rule.

    Three short sentences at most, and one for each knob in play that the models do not know.
    """
    turned: list[str] = []
    absent: list[str] = []
    reasons: dict[str, list[str]] = {}
    for name, knob in KNOBS.items():
        values = {Configuration(launch).get(name) for launch in candidates.launches}
        if knob.kind == "live":
            values = {live.get(name) for lives in set(candidates.lives) for live in lives}
        if len(values) > 1:
            turned.append(name)
        elif knob.kind == "launch" and name == "global_batch" and len(job.global_batches) == 1:
            reasons["the job says its steps at one size only"] = [name]
        elif knob.kind == "launch" and name not in space.choices:
            absent += [] if knob.changes_training else [name]  # no space has it unasked
        elif knob.kind == "launch":
            why = _why_not(name, space, candidates, job, cluster)
            reasons.setdefault(why, []).append(name)
    if "global_batch" in turned:
        sizes = sorted({launch["global_batch"] for launch in candidates.launches})
        steps = ", ".join(f"{job.steps_with(int(str(size)))} at {size}" for size in sizes)
        turned[turned.index("global_batch")] += f" (the solution takes {steps} steps)"
    sentences = [f"in play: {', '.join(turned) or 'no knob'}"]
    if absent:
        sentences.append(_absent(space, absent))
    if reasons:
        left = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
        sentences.append(f"not in play: {left}")
    return (*sentences, *not_predicted(turned, unpredicted_knobs(prior_of(job, cluster))))


def not_predicted(knobs: Iterable[str], unpredicted: Mapping[str, str]) -> tuple[str, ...]:
    """Return a sentence for each knob whose effect is not predicted, for the stated reason."""
    return tuple(
        f"the models predict no effect of {name}: {unpredicted[name]}"
        for name in knobs
        if name in unpredicted
    )


def not_searched(space: SearchSpace) -> str:
    """Return a sentence on the launch knobs that a space leaves out; "" if it has all."""
    launch = (n for n, k in KNOBS.items() if k.kind == "launch" and not k.changes_training)
    absent = [n for n in launch if n not in space.choices and n != "global_batch"]
    return _absent(space, absent) if absent else ""


def _absent(space: SearchSpace, names: list[str]) -> str:
    names = sorted(names, key=lambda name: not name.endswith("parallel"))
    shown = ", ".join(names)
    if len(names) > NAMED_ABSENT + 1:
        shown = f"{', '.join(names[:NAMED_ABSENT])} and {len(names) - NAMED_ABSENT} others"
    return f"not in space {space.name!r}: {shown} (`tuner list spaces` lists others)"


def _why_not(
    name: str, space: SearchSpace, candidates: Candidates, job: TrainingJob, cluster: Cluster
) -> str:
    knob, today, first = KNOBS[name], Configuration(candidates.launches[0]), ""
    for value in space.values(job, cluster)[name]:
        if value == today.get(name):
            continue
        values = {**today.launch, name: value}
        if knob.choices == () and name.endswith("parallel") and name != "data_parallel":
            values["data_parallel"] = 1
        changed = Configuration.of(values)
        phrases = broken_rules(changed, job, cluster) or unrunnable(changed, job)
        if not phrases and knob.changes_training:
            return CHANGES
        first = first or next(iter(phrases), "")
    return first or "it has one value here"

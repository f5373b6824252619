"""Knobs that a search of the built-in training program varies, and reasons to leave the others.

If the front has no tensor parallelism, the user should know whether it lost, was refused or was
not in the space. So each launch knob is either varied, or named with its reason: the space does not
name it (and which one does), or the rule that refuses all its other values here.
"""

from __future__ import annotations

from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.rules import broken_rules, unrunnable
from tuner.search_spaces.space import SearchSpace, load_space, space_names

__all__ = ["knobs_in_play"]


def knobs_in_play(
    candidates: Candidates, space: SearchSpace, job: TrainingJob, cluster: Cluster
) -> tuple[str, ...]:
    """Two sentences at most: what is in play, and why the rest is not."""
    turned: list[str] = []
    reasons: dict[str, list[str]] = {}
    for name, knob in KNOBS.items():
        values = {Configuration(launch).get(name) for launch in candidates.launches}
        if knob.kind == "live":
            values = {live.get(name) for lives in set(candidates.lives) for live in lives}
        if len(values) > 1:
            turned.append(name)
        elif knob.kind == "launch":
            why = _why_not(name, space, candidates, job, cluster)
            reasons.setdefault(why, []).append(name)
    if "global_batch" in turned:
        sizes = sorted({launch["global_batch"] for launch in candidates.launches})
        steps = ", ".join(f"{job.steps_with(int(str(size)))} at {size}" for size in sizes)
        turned[turned.index("global_batch")] += f" (the solution takes {steps} steps)"
    played = f"in play: {', '.join(turned) or 'no knob'}"
    left = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
    return (played, f"not in play: {left}") if left else (played,)


def _why_not(
    name: str, space: SearchSpace, candidates: Candidates, job: TrainingJob, cluster: Cluster
) -> str:
    """Return why a launch knob has a single value, as a phrase."""
    if name == "global_batch" and len(job.global_batches) == 1:
        return "the job says its steps at one size only"
    if name not in space.choices:
        others = [other for other in space_names() if name in load_space(other).choices]
        named = f" (--space {' or '.join(others)} has it)" if others else ""
        return f"not in space {space.name!r}{named}"
    knob, today = KNOBS[name], Configuration(candidates.launches[0])
    for value in space.values(job, cluster)[name]:
        if value == today.get(name):
            continue
        values = {**today.launch, name: value}
        if knob.choices == () and name.endswith("parallel") and name != "data_parallel":
            values["data_parallel"] = 1
        changed = Configuration.of(values)
        if phrases := broken_rules(changed, job, cluster) or unrunnable(changed, job):
            return phrases[0]
    return "it has one value here"

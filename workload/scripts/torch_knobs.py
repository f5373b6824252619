"""Knobs that the hook sets in any program of torch: a loader's workers and pinned memory, an
optimizer's kernel, how gradients are cleared, cuDNN's choice of kernels, compilation of the model.

They are added to a search where the first steps show that they may matter: a program that hardly
waits for its loader gains nothing by other workers. One launch with other values of all of them
must then train the same batches to the same losses; what does not is left out, and said. A model is
compiled for the first time in a probe, whose first steps are compared in the same way: that takes
tens of seconds, for which nobody waits before the first point.
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.knob_declarations import Knob
from tuner.search_spaces.knobs import Value
from tuner.workload.scripts.evidence import batches_seen, differs
from tuner.workload.scripts.script_job import COMPILE, ScriptJob

#: Launches a job under a configuration, and returns the facts of its first steps or, as a phrase,
#: why there are none.
Launch = Callable[[ScriptJob, Configuration], Mapping[str, Any] | str]

#: Share of the first steps that a program waits for its loader, or updates its parameters, below
#: which no setting of it is searched: it could save no more.
WORTH = 0.05
#: Losses of the same batches that differ by less, as a share of the largest, differ by rounding.
_ROUNDING = 1e-3
#: The same of other random numbers, in means over the steps.
_OTHER_DRAWS = 0.3
#: Processes beyond which a loader of one rank gains nothing on common nodes.
_MOST_WORKERS = 16
_PARTS = ("waited", "updated")
_OF_LOADER = ("num_workers", "prefetch_factor", "pin_memory")
#: Share of the first steps that neither loads nor updates, below which a model is not compiled.
_COMPUTES = 0.3
#: Least length of a training, seconds, that may repay the compilation of its model, on a GPU and on
#: cores: it takes up to a minute or two there, in the launch that proves it and in each later one.
#: On a GPU, where trainings are long, an unknown length is long enough.
_REPAID_S = {True: 1200.0, False: 3600.0}
_BY_ITSELF = "the program sets it itself"
#: Facts of the first steps that are compared.
_COMPARED = ("groups", "rates", "samples", "named", "batch", "first_batch", "first_batches")
_COMPILERS = ("c++", "g++", "clang++")
_FLAG = ("false", "true")


def settings_today(facts: Mapping[str, Any]) -> dict[str, Value]:
    """Return today's values of what the hook can set, by the name of the knob."""
    loader, optimizer = facts.get("loader") or {}, facts.get("optimizer") or {}
    found: dict[str, Value] = {}
    if loader.get("items") and not loader.get("batch_on_device"):
        found["num_workers"] = int(loader["num_workers"])
        if loader["num_workers"]:
            found["prefetch_factor"] = int(loader["prefetch_factor"] or 2)
        found["pin_memory"] = _FLAG[bool(loader.get("pin_memory"))]
    if optimizer.get("kernel"):
        found["optimizer_kernel"] = str(optimizer["kernel"])
    if facts.get("zeroes"):
        found["set_to_none"] = "false"
    backend = facts.get("backend") or {}
    if backend.get("convolutions") and not backend.get("deterministic"):
        found["cudnn_benchmark"] = _FLAG[backend["benchmark"]]
    if "compiled" in facts and facts.get("counts") == "optimizer":
        found["compile"] = _FLAG[bool(facts["compiled"])]
    return found


def waits(facts: Mapping[str, Any]) -> dict[str, float]:
    """Return the shares of the first steps that went by in the loader and in the optimizer.

    By the clock, or by what the program's own thread ran if that is more: other processes make a
    step on all cores many times as long, beside which the rest looks as if it did not matter. Or of
    the middle step: a program that plots or evaluates before its second one does so once.
    """
    groups = [group for group in facts.get("groups", ())[1:] if group.get("took")]
    ran = [group.get("busy", {}) for group in groups]
    of_steps = {name: [_share([group], name) for group in groups] for name in _PARTS}
    return {
        name: max(
            _share(groups, name), _share(ran, name), statistics.median(of_steps[name] or [0.0])
        )
        for name in _PARTS
    }


def _share(groups: Sequence[Mapping[str, Any]], part: str) -> float:
    took = sum(group.get("took", 0.0) for group in groups)
    return sum(group.get(part, 0.0) for group in groups) / took if took else 0.0


def torch_knobs(job: ScriptJob, facts: Mapping[str, Any], cluster: Cluster) -> tuple[Knob, ...]:
    """Return the knobs of torch that may matter for a script, which were not tried yet."""
    share, today, gpu = waits(facts), job.frame.settings, cluster.device.is_gpu
    loader = facts.get("loader") or {}
    taken = {knob.name for knob in job.knobs}
    found = []
    workers = today.get("num_workers")
    # Who reads by workers today has chosen that they draw ahead from a sampler of his own.
    if workers == 0 and loader.get("own_sampler"):
        workers = None
    if share["waited"] >= WORTH and workers is not None:
        cores = max(1, (os.cpu_count() or 1) // max(1, min(job.devices, cluster.devices_per_node)))
        counts = {min(_MOST_WORKERS, max(1, cores >> halved)) for halved in range(3)}
        found.append(_knob("num_workers", sorted({int(workers), *counts}), workers))
        if ahead := today.get("prefetch_factor"):
            found.append(_knob("prefetch_factor", [int(ahead), 4 * int(ahead)], ahead))
    kernels = (facts.get("optimizer") or {}).get("kernels", ())
    if "optimizer_kernel" in today and kernels:
        best = kernels[-1]  # fused where there is one: it is never more launches than in lists
        matters = gpu or share["updated"] >= WORTH
        if matters and best != today["optimizer_kernel"]:
            now = today["optimizer_kernel"]
            found.append(_knob("optimizer_kernel", [now, best], now))
    may_matter = {
        "pin_memory": gpu and share["waited"] >= WORTH,
        "set_to_none": gpu or share["updated"] >= WORTH,
        "cudnn_benchmark": gpu,
        "compile": 1 - share["waited"] - share["updated"] >= _COMPUTES
        and _repays_compilation(job, facts, gpu=gpu),
    }
    for name, matters in may_matter.items():
        if matters and today.get(name) == "false":
            found.append(Knob(name, _FLAG, kind="flag", baseline="false", how=f"torch:{name}"))
    return tuple(knob for knob in found if knob.name not in taken and len(knob.values) > 1)


def _repays_compilation(job: ScriptJob, facts: Mapping[str, Any], *, gpu: bool) -> bool:
    steps_s = [group["took"] for group in facts.get("groups", ())[1:] if group.get("took")]
    if not steps_s or not (gpu or any(map(shutil.which, _COMPILERS))):
        return False
    if not job.steps:
        return gpu
    return job.steps * sum(steps_s) / len(steps_s) >= _REPAID_S[gpu]


def _knob(name: str, values: Sequence[Value], today: Value) -> Knob:
    return Knob(name, tuple(values), baseline=today, how=f"torch:{name}")


def with_torch_knobs(
    job: ScriptJob,
    facts: Mapping[str, Any],
    launch: Launch,
    cluster: Cluster,
    announce: Callable[[str], None],
) -> ScriptJob:
    """Return the job with the knobs of torch of which one launch proves that it trains the same."""
    every = torch_knobs(job, facts, cluster)
    knobs = [knob for knob in every if knob.name != COMPILE]
    found = _with_launched(job, facts, launch, knobs, announce)
    if len(knobs) == len(every):
        return found
    compiled = found.declares([*found.knobs, *(knob for knob in every if knob.name == COMPILE)])
    kept = {name: facts[name] for name in _COMPARED if name in facts}
    return replace(compiled, frame=replace(compiled.frame, first_steps=kept))


def _with_launched(
    job: ScriptJob,
    facts: Mapping[str, Any],
    launch: Launch,
    knobs: Sequence[Knob],
    announce: Callable[[str], None],
) -> ScriptJob:
    parts: dict[str, list[Knob]] = {}
    for knob in knobs:  # those of the loader together
        parts.setdefault("loader" if knob.name in _OF_LOADER else "", []).append(knob)
    if not parts:
        return job
    tried, why = _tried(job, facts, launch, knobs)
    if why and len(parts) > 1:
        for part in parts.values():
            job, why = _tried(job, facts, launch, part)
            if why:
                announce(f"{_names(part)} left as today: {why}")
        return job
    if why:
        announce(f"{_names(knobs)} left as today: {why}")
    return tried


def _names(knobs: Sequence[Knob]) -> str:
    return f"{' and '.join(knob.name for knob in knobs)} {'are' if len(knobs) > 1 else 'is'}"


def _tried(
    job: ScriptJob, facts: Mapping[str, Any], launch: Launch, knobs: Sequence[Knob]
) -> tuple[ScriptJob, str]:
    """Return the job with the knobs and "", or without them and why."""
    able = job.declares([*job.knobs, *knobs])
    chosen = {knob.name: _other_value(knob) for knob in knobs}
    launched = Configuration(Settings({**able.baseline.launch, **chosen}), able.baseline.live)
    again = launch(able, launched)
    why = f"it does not start ({again})" if isinstance(again, str) else ""
    if not isinstance(again, str):
        why = trains_otherwise(facts, again, chosen)
    if why:
        values = " and ".join(f"{name}={value}" for name, value in chosen.items())
        return job, f"with {values}, {why}"
    return able, ""


def _other_value(knob: Knob) -> Value:
    # Of workers two: with one alone a dataset's own generator would go on as today.
    others = [value for value in knob.values if value != knob.baseline]
    return 2 if knob.name == "num_workers" and 2 in others else others[-1]


def differs_from_today(
    job: ScriptJob, configuration: Configuration, facts: Mapping[str, Any]
) -> str:
    """Return how the first steps of a probe differ from today's, a phrase; "" if they do not."""
    today = job.frame.first_steps
    # A probe does not look for names: up to Python 3.12 a frame keeps what it was asked for.
    seen = {**facts, "named": today.get("named", {})}
    chosen = {
        knob.name: value
        for knob in job.knobs
        if knob.target[0] == "torch"
        and (value := configuration.get(knob.name)) not in (None, knob.baseline)
    }
    split = ("micro_batch", "data_parallel")
    if all(configuration.get(name) == job.baseline.get(name) for name in split):
        return trains_otherwise(today, seen, chosen)
    if not facts.get("compiles"):
        return _BY_ITSELF
    same = configuration.get("data_parallel") == job.baseline.get("data_parallel")
    of_today = (job.frame.micro_batch, job.frame.accumulation)
    return differs(today, of_today, seen, batches_seen(seen), same_samples=same)


def trains_otherwise(
    facts: Mapping[str, Any], again: Mapping[str, Any], chosen: Mapping[str, Value]
) -> str:
    """Return how a launch with other settings of torch trained otherwise, a phrase; "" if not.

    Args:
        facts: of the launch as it is today.
        again: of the launch with the settings `chosen`.
    """
    loader, backend = again.get("loader") or {}, again.get("backend") or {}
    set_there = {
        **loader,
        "pin_memory": _FLAG[bool(loader.get("pin_memory"))],
        "optimizer_kernel": again.get("optimizer", {}).get("kernel"),
        "set_to_none": _FLAG[not again.get("zeroes")],
        "cudnn_benchmark": _FLAG[bool(backend.get("benchmark"))],
        "compile": _FLAG[bool(again.get("compiles"))],
    }
    if any(set_there.get(name) != value for name, value in chosen.items()):
        return _BY_ITSELF
    before, after = batches_seen(facts), batches_seen(again)
    if (before.micro_batch, before.accumulation) != (after.micro_batch, after.accumulation):
        seen = f"{after.micro_batch} samples x {after.accumulation} passes"
        return f"a step is not as it was ({seen if after.micro_batch else after.how})"
    reads = bool({*_OF_LOADER} & {*chosen})
    if "num_workers" in chosen and not again.get("reads_by"):
        return (
            "its dataset keeps something from one item to the next (a generator of its own?), "
            "which every worker would do by itself"
        )
    if _of_groups(facts, "indices") != _of_groups(again, "indices"):
        return "it draws other samples, or in another order"
    old, new = _of_groups(facts, "batches"), _of_groups(again, "batches")
    if reads and None in (*old, *new):
        return "its batches cannot be compared"
    made, wanted = (len(each.get("groups", ())) for each in (again, facts))
    if made < wanted:
        return f"{made} of {wanted} steps were made in time"
    was, now = _losses(facts), _losses(again)
    if not was or len(was) != len(now):
        return "the loss cannot be read, so it is not known if it stays the same"
    scale = max(map(abs, (*was, *now))) or 1.0
    if old == new:
        most = max(abs(one - other) for one, other in zip(was, now, strict=True))
        if most > _ROUNDING * scale:
            return f"a loss differs by {most / scale:.2g}, more than rounding does"
    elif again.get("reads_by") != "random":
        return "its batches are others"
    elif abs(sum(was) - sum(now)) > _OTHER_DRAWS * len(was) * scale:
        return f"the losses are {sum(now) / len(now):.4g} and not {sum(was) / len(was):.4g}"
    return ""


def _of_groups(facts: Mapping[str, Any], name: str) -> list[Any]:
    return [each for group in facts.get("groups", ()) for each in group.get(name, ())]


def _losses(facts: Mapping[str, Any]) -> list[float]:
    found = [(group.get("loss"), group.get("scale", 1.0)) for group in facts.get("groups", ())]
    if any(loss is None for loss, _ in found):
        return []
    return [loss / (scale or 1.0) for loss, scale in found]

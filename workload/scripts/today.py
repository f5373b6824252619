"""Facts of a script's training today, each with its source."""

from __future__ import annotations

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.today_facts import TodayFacts
from tuner.workload.scripts.script_training import ScriptTraining

#: Part of every configuration's name, and no fact of a program that shards nothing.
_NO_ZERO = ("zero_stage", 0)


def facts_today(job: ScriptTraining, own: Configuration, today: Configuration) -> TodayFacts:
    """Return the facts of a script under today's configuration; `own` is its command's."""
    launcher = job.launcher
    by_launcher = launcher is not None and launcher.words and launcher.processes
    by = "as your command starts them" if job.line else "no launcher says more"
    sources = {"ranks": launcher.kind if by_launcher and launcher else by}
    knobs = {**today.launch, **today.live}
    if not job.frame.on_deepspeed and "zero_stage" not in job.placeholders:
        knobs = {name: value for name, value in knobs.items() if (name, value) != _NO_ZERO}
    for name in knobs:
        if name in job.placeholders:
            sources[name] = "the command"
        elif job.stated_values.get(name) and job.driver is not None:
            sources[name] = job.driver.driver.name
    replicas = today.data_parallel
    micro = today.micro_batch if job.frame.micro_batch else 0
    times = job.frame.accumulation
    if job.global_batch and micro:
        times = job.global_batch // (micro * replicas)
    sources |= job.frame.sources
    if (today.micro_batch, replicas) != (own.micro_batch, own.data_parallel):
        sources |= dict.fromkeys(("micro_batch", "accumulation"), "--today")
    return TodayFacts(
        ranks=today.world_size,
        replicas=replicas,
        global_batch=job.global_batch,
        micro_batch=micro,
        accumulation=times,
        steps=job.steps,
        knobs=knobs,
        sources=sources,
    )

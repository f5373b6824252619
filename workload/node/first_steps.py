"""The steps of a launch before its first window: what they show, and what is decided by them."""

from __future__ import annotations

from dataclasses import replace

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.workload.accumulation import AccumulationPlan, steps_take_too_long
from tuner.workload.hook import GROUPS
from tuner.workload.limits import LONG_STEP_S
from tuner.workload.measure.window import Conductor, ProbeFailed
from tuner.workload.probe import Failure, WindowPolicy
from tuner.workload.scripts.evidence import batches_seen
from tuner.workload.scripts.script_job import ScriptJob


def look_further(conductor: Conductor) -> None:
    """Run the steps that the hook counts besides the first; fewer if they are long or it ends."""
    try:
        while conductor.done < GROUPS and sum(conductor.run(1)) < LONG_STEP_S:
            pass
    except ProbeFailed:
        if not conductor.ended_by_itself:
            raise


def require_batches(conductor: Conductor, job: TrainingJob, configuration: Configuration) -> None:
    """Raise ProbeFailed if the first steps trained other batches than the configuration's."""
    if not isinstance(job, ScriptJob) or not job.frame.counted:
        return
    if conductor.done < GROUPS:
        conductor.run(GROUPS - conductor.done)
    seen = batches_seen(conductor.facts)
    wanted = configuration.micro_batch, configuration.accumulation(job.global_batch)
    if seen.steps and (seen.micro_batch, seen.accumulation) != wanted:
        found = f"{seen.micro_batch} samples x {seen.accumulation} backward passes a step"
        asked = f"{wanted[0]} x {wanted[1]}"
        raise ProbeFailed(
            Failure("refused", f"each rank trains {found} where {asked} are to be measured")
        )


def choose_accumulation(
    conductor: Conductor, plan: AccumulationPlan, policy: WindowPolicy
) -> AccumulationPlan:
    """Decide whether to measure micro-batches, by a step of the largest accumulation.

    The ranks have done their first step with the smallest one.
    """
    if not plan.measured:
        return plan
    if conductor.micro_batches != plan.measured[0]:
        conductor.set_accumulation(plan.own)  # where it was set after all
        return AccumulationPlan(
            plan.own,
            why_whole="whole steps are measured: the program decides on its accumulation",
        )
    largest = plan.measured[-1]
    conductor.set_accumulation(largest)
    whole_s = sum(conductor.run(1)) * plan.own / largest
    if steps_take_too_long(whole_s, policy.min_steps, policy.min_s):
        conductor.set_accumulation(plan.measured[0])
        return plan
    conductor.set_accumulation(plan.own)
    return replace(plan, measured=())

"""A plan as text: what was predicted, the sizes, and the probes that would test it."""

from __future__ import annotations

from tuner.formatting import Units, duration, number, settings_text
from tuner.results.choice import limits_phrase
from tuner.results.plan_facts import PlanFacts
from tuner.results.result import Result


def plan_lines(result: Result) -> list[str]:
    """Return the lines of a plan's answer; empty for a study."""
    plan = result.plan
    if plan is None:
        return []
    return [*size_lines(result), _counted(plan, len(result.front_points))]


def _counted(plan: PlanFacts, front: int) -> str:
    left = plan.configurations - plan.fitting
    out = f", {left:,} of which do not fit in memory" if left else ""
    took = duration(plan.seconds) if plan.seconds >= 1 else "less than 1 s"
    return (
        f"Predicted, not measured: {plan.configurations:,} configurations in {took}{out}; "
        f"{front} are on the front of the models."
    )


def size_lines(result: Result) -> list[str]:
    """Return the answer by number of GPUs as a table; empty if one cluster was planned for."""
    plan = result.plan
    if plan is None or not plan.sizes:
        return []
    units = Units.of([size.best for size in plan.sizes])
    rows = [("GPUs", "time", "energy (predicted)", "power", "", "configuration")]
    for size in plan.sizes:
        notes = ["knee"] if size.is_knee else []
        notes += [] if size.choice.met else ["beyond the limits"]
        rows.append(
            (
                str(size.gpus),
                units.time_text(size.best.time_to_solution_s),
                units.energy_text(size.best.energy_to_solution_kJ),
                f"{number(size.best.power_W)} W",
                ", ".join(notes),
                settings_text(size.best.configuration),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        "  "
        + "  ".join([*(c.rjust(w) for c, w in zip(row[:5], widths, strict=True)), row[5]]).rstrip()
        for row in rows
    ]
    meets = [size.gpus for size in plan.sizes if size.choice.met]
    if limits_phrase(result.constraints, units) and meets:
        lines.append(f"The fewest GPUs that meet the limits: {min(meets)}.")
    return lines


def probe_lines(result: Result) -> list[str]:
    """Return the probes that would teach most before the plan is trusted; empty for a study."""
    plan = result.plan
    if plan is None or not plan.probes:
        return []
    return [
        "Before you trust this plan, measure these, which would reduce its uncertainty most:",
        *(
            f"  {number_}. {settings_text(configuration)}"
            for number_, configuration in enumerate(plan.probes, start=1)
        ),
    ]

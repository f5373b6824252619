"""A plan as text: what was predicted, the sizes, and the probes that would test it."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.display.columns import BRIEF_TEXT, ENERGY, TIME
from tuner.formatting import Units, duration, number, right_aligned, settings_text
from tuner.planning.kinds import Kind
from tuner.results.choice import limits_phrase
from tuner.results.parts import PlanFacts
from tuner.results.result import Result
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.rules import other_states

ASSUMED = "What [program] of the job's file does not state is assumed as in the built-in program."


def plan_lines(result: Result) -> list[str]:
    """Return the lines of a plan's answer; empty for a study."""
    if result.plan is None:
        return []
    counted = _counted(result.plan, len(result.front_points))
    return [*size_lines(result), counted, *states_lines(result.job), ASSUMED]


def states_lines(job: TrainingJob | None) -> list[str]:
    """Return a sentence on how a job stores weights and states, if that is not the usual."""
    if job is None or not (stored := other_states(job)):
        return []
    unknown = job.lora is not None and job.lora.quantization != "none"
    time = "; the time to dequantize weights is unknown and left out" if unknown else ""
    return [f"Memory is that of {', '.join(stored)}{time}."]


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
    rows: list[tuple[str, ...]] = [
        ("GPUs", "time", "energy (predicted)", "power", "", "configuration")
    ]
    for size in plan.sizes:
        notes = ["knee"] * size.is_knee + ["beyond the limits"] * (not size.choice.met)
        figures = (column.text(size.best, units) for column in BRIEF_TEXT)
        settings = settings_text(size.best.configuration)
        rows.append((str(size.gpus), *figures, ", ".join(notes), settings))
    lines = right_aligned(rows, "  ")
    meets = [size.gpus for size in plan.sizes if size.choice.met]
    if limits_phrase(result.constraints, units) and meets:
        lines.append(f"The fewest GPUs that meet the limits: {min(meets)}.")
    return lines


def kind_lines(kinds: Sequence[Kind]) -> list[str]:
    """Return the answer by kind of GPU as a table."""
    units = Units.of([kind.best for kind in kinds if kind.best is not None])
    met = [kind for kind in kinds if kind.met]
    rows = [("cluster", "GPUs", "time", "energy (predicted)", "price", "", "configuration")]
    for kind in kinds:
        best, cost = kind.best, kind.cost
        if best is None:
            rows.append((kind.cluster.name, "", "", "", "", "", kind.refused))
            continue
        rows.append(
            (
                kind.cluster.name,
                str(best.configuration.world_size),
                TIME.text(best, units),
                ENERGY.text(best, units),
                "" if cost is None else number(cost),
                ", ".join(_merits(kind, met)) if kind.met else "beyond the limits",
                settings_text(best.configuration),
            )
        )
    lines = right_aligned(rows, "  ")
    lines.append("Predicted, not measured; each kind at its best configuration.")
    jobs = [kind.result.job for kind in kinds if kind.result is not None]
    lines += states_lines(jobs[0]) if jobs else []
    if len({kind.charges_host for kind in kinds if kind.best is not None}) > 1:
        host = ", ".join(kind.cluster.name for kind in kinds if kind.charges_host)
        lines.append(f"Energies hold the hosts on {host} and those of the GPUs alone elsewhere.")
    if met and any(kind.cost is not None for kind in met) and any(k.cost is None for k in met):
        lines.append("A price is missing: NAME=PRICE in --cluster states that of a GPU hour.")
    return lines


def _merits(kind: Kind, met: Sequence[Kind]) -> list[str]:
    """Return what a kind is best at among those that meet the limits."""
    if len(met) < 2:
        return []
    both = [(each, each.best) for each in met if each.best is not None]
    fastest = min(both, key=lambda pair: pair[1].time_to_solution_s)[0]
    found = ["fastest"] if kind is fastest else []
    if len({each.charges_host for each in met}) == 1:
        least = min(both, key=lambda pair: pair[1].energy_to_solution_kJ)[0]
        found += ["least energy"] if kind is least else []
    costs = [each.cost for each in met if each.cost is not None]
    if len(costs) == len(met) and kind.cost == min(costs):
        found.append("cheapest")
    return found


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

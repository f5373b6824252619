"""Predictions as text: a plan with its sizes and the probes that would test it, and `tuner fit`."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.answer.answer import Answer
from tuner.answer.parts import PlanFacts
from tuner.answer.views import AnswerExtra
from tuner.display.text import share_lines
from tuner.display.view import figure_texts
from tuner.formatting import (
    Units,
    counted,
    duration,
    energy_text,
    number,
    right_aligned,
    settings_legend,
    settings_text,
    signed_percent,
)
from tuner.planner.evaluate import Forecast, interruptions
from tuner.planner.fit import SURE, Change, Fit, Headroom
from tuner.planner.plan import plan_result, probes_of_plan, read_plan
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.job import TrainingJob, job_names
from tuner.search_spaces.knobs import short_word
from tuner.search_spaces.model_facts import other_states
from tuner.study.load import load_spec

#: Nodes from which a plan says what it does not model.
MANY_NODES = 1000
#: Unexpected interruptions of Llama 3's training: 419 in 54 days on 16,384 GPUs in nodes of eight
#: (arXiv 2407.21783, section 3.3.4).
INTERRUPTIONS_PER_NODE_DAY = 419 / 54 / 2048
#: Doublings of the probed GPUs from which a prediction says that it is extrapolated.
FAR_DOUBLINGS = 4
ASSUMED = "What [program] of the job's file does not state is assumed as in the built-in program."


def large_lines(result: Answer) -> list[str]:
    """Return lines on the cost of failures and on effects of many nodes that the models ignore."""
    cluster, plan = result.cluster, result.plan
    if cluster is None or plan is None:
        return []
    gpus = max((size.gpus for size in plan.sizes), default=cluster.devices)
    nodes = max(1, gpus // cluster.devices_per_node)
    counted, left_out = _failure_lines(cluster, nodes), list[str]()
    if not counted:
        a_day = number(INTERRUPTIONS_PER_NODE_DAY * nodes)
        left_out.append(
            "failures and restarts (at the rate published for Llama 3, arXiv 2407.21783, "
            f"{a_day} interruptions a day; a cluster file may state failures_per_node_day)"
        )
    if nodes < MANY_NODES:
        return counted
    left_out += ["an oversubscribed network", "the slowest of all devices"]
    listing = f"{', '.join(left_out[:-1])}{',' if len(left_out) > 2 else ''} and {left_out[-1]}"
    makes = f"each makes a training on {nodes:,} nodes longer"
    return [*counted, f"Not modelled, and {makes}: {listing}."]


def _failure_lines(cluster: Cluster, nodes: int) -> list[str]:
    found = interruptions(cluster, nodes)
    if found is None:
        return []
    return [
        f"Failures are counted: {number(found.a_day)} a day on {counted(nodes, 'node')}, with "
        f"checkpoints every {duration(found.interval_s)}, make time "
        f"{signed_percent(found.time_ratio - 1, 1)}."
    ]


def _assumed(job: TrainingJob | None) -> list[str]:
    # A job that is built in is what the built-in program trains.
    return [] if job is not None and job.name in job_names() else [ASSUMED]


def states_lines(job: TrainingJob | None) -> list[str]:
    """Return a sentence on how a job stores weights and states, if that is not the usual."""
    if job is None or not (stored := other_states(job)):
        return []
    unknown = job.lora is not None and job.lora.quantization != "none"
    time = "; the time to dequantize weights is unknown and left out" if unknown else ""
    return [f"Memory is that of {', '.join(stored)}{time}."]


def _counted(plan: PlanFacts) -> str:
    left = plan.configurations - plan.fitting
    out = f", {left:,} of which do not fit in memory" if left else ""
    took = duration(plan.seconds) if plan.seconds >= 1 else "less than 1 s"
    return f"Predicted, not measured: {plan.configurations:,} configurations in {took}{out}."


def size_lines(result: Answer) -> list[str]:
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
        figures = figure_texts(size.best, units)
        settings = settings_text(size.best.configuration)
        rows.append((str(size.gpus), *figures, ", ".join(notes), settings))
    lines = right_aligned(rows, "  ")
    meets = [size.gpus for size in plan.sizes if size.choice.met]
    if result.limits and meets:
        lines.append(f"The fewest GPUs that meet the limits: {min(meets)}.")
    return lines


def probe_lines(result: Answer) -> list[str]:
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


GB = 1e9


def fit_lines(fit: Fit, costs: Forecast) -> list[str]:
    """Return the answer as lines."""
    memory_GB = {name: value / GB for name, value in fit.parts.items()}
    doubted = bool(fit.doubts)
    none = f"No configuration of space {fit.space} fits on {fit.cluster.name}"
    changes = ["", none] if fit.probability < SURE else []
    if fit.changes:
        first, *slower = fit.changes
        changes = ["", "Cheapest change that fits", f"  {_change(first, doubted)}"]
        if slower:
            changes += [
                "Slower, with fewer changes",
                *(f"  {_change(each, doubted)}" for each in slower),
            ]
    shown = [fit.configuration.short, *changes]
    if legend := settings_legend(shown):
        changes = [*changes, "", f"({legend})"]
    return [
        *doubt_lines(fit.doubts),
        f"Predicted, not measured: {fit.job.name} on {fit.cluster.name}, "
        f"{fit.configuration.world_size} of {fit.cluster.devices} {fit.cluster.device.plural}",
        f"  {fit.configuration.short}",
        *(f"  {sentence}" for sentence in fit.assumed),
        *(f"  {sentence}" for sentence in states_lines(fit.job)),
        f"  {_verdict(fit)}",
        *_host(fit),
        *cost_lines(costs),
        "",
        *share_lines("Memory of the fullest rank", memory_GB, "GB"),
        "",
        "Limits, everything else as above",
        *_limits(fit),
        *changes,
        "",
        *breakdown_lines(costs),
        "",
        "Known error of such predictions",
        *(f"  {sentence}" for sentence in _assumed(fit.job)),
        *(f"  {sentence}" for sentence in costs.known_error),
        *(() if fit.known_error else _unknown(fit)),
    ]


def doubt_lines(doubts: Sequence[str]) -> list[str]:
    """Return the first lines of an answer: its assumptions."""
    return [f"Doubtful: {doubt}." for doubt in doubts]


def _verdict(fit: Fit) -> str:
    sure = max(fit.probability, 1 - fit.probability) >= SURE
    likely = "fits" if sure else "probably fits"
    words = likely if fit.fits else "does not fit" if sure else "may not fit"
    spare = "to spare" if fit.spare_bytes >= 0 else "too many"
    if fit.doubts:
        words = "may fit" if fit.fits else "may not fit"
        chance = "no probability, because of the doubt above"
    else:
        chance = f"probability of fitting {_percent(fit.probability)}"
    return (
        f"{words}: {fit.memory_bytes / GB:.1f} of {fit.capacity_bytes / GB:.1f} GB, "
        f"{abs(fit.spare_bytes) / GB:.1f} GB {spare} ({chance})"
    )


def _percent(probability: float) -> str:
    if probability > 0.99:
        return "over 99 %"
    return "under 1 %" if probability < 0.01 else f"{100 * probability:.0f} %"


def _host(fit: Fit) -> list[str]:
    room = fit.cluster.host_memory_bytes
    of = f" of {room / GB:.1f}" if room else ""
    unknown = "" if room else " (the cluster file lacks host_memory_bytes: no room is checked)"
    lines: list[str] = []
    for where, size in (
        ("on each node's host", fit.host_memory_bytes),
        ("while the whole model is saved, on the first one", fit.saving_bytes),
    ):
        if size:
            peak = size if not lines else size + fit.host_memory_bytes
            short = " (DOES NOT FIT)" if room and peak > room else ""
            lines.append(f"  {where}: {peak / GB:.1f}{of} GB{short}{unknown}")
    return lines


def _most(most: Headroom, cap: str, doubted: bool) -> str:
    if not most.likely:
        return "none fits"
    text = f"{most.likely:,}"
    if most.sure < most.likely and not doubted:
        text += f" ({most.sure:,} to be sure)" if most.sure else " (none is sure)"
    return f"{text}, {cap}" if most.capped else text


def _limits(fit: Fit) -> list[str]:
    fewest = "none up to 16 times the cluster's"
    if fit.fewest_gpus is not None:
        gpus, change = fit.fewest_gpus
        fewest = f"{gpus:,}"
        if change.knobs:
            fewest += f", with {_words(change)} ({change.time_ratio:.3g} times as long a step)"
    replicas = "none" if fit.fewest_replicas is None else f"{fit.fewest_replicas:,}"
    doubted = bool(fit.doubts)
    largest = _most(fit.micro_batch, "as large as the global batch allows", doubted)
    longest = _most(fit.sequence_length, "as long as the model allows", doubted)
    return [
        f"  largest micro-batch  {largest}",
        f"  longest sequence     {longest}",
        f"  fewest GPUs          {replicas} by replicas alone",
        f"  in space {fit.space:<11} {fewest}",
    ]


def _words(change: Change) -> str:
    return " ".join(short_word(name, change.configuration.get(name)) for name in change.knobs)


def _change(change: Change, doubted: bool) -> str:
    time, energy = change.time_ratio - 1, change.energy_ratio - 1
    chance = "" if doubted else f" ({_percent(change.probability)})"
    return (
        f"{_words(change)}: {change.memory_bytes / GB:.1f} GB"
        f"{chance}, {signed_percent(time)} time and {signed_percent(energy)} energy of a step"
    )


def _unknown(fit: Fit) -> tuple[str, ...]:
    return (
        f"  peak memory: unknown on {fit.cluster.device.name}: peaks were compared with "
        "measurements on other devices only (python -m benchmarks.fit); the first probe tells",
    )


def _corrected_lines(forecast: Forecast) -> list[str]:
    (t, t_low, t_high), (w, w_low, w_high), (j, j_low, j_high) = (
        forecast.corrected[name] for name in ("step_time_s", "power_W", "energy_J")
    )
    return [
        f"  corrected by {forecast.probes} windows: {t:.4g} s a step (90 %: {t_low:.4g} to "
        f"{t_high:.4g}), {w:,.0f} W ({w_low:,.0f} to {w_high:,.0f}), {j:,.4g} J a step "
        f"({j_low:,.4g} to {j_high:,.4g})",
        *(
            [f"  extrapolated over {forecast.doublings:.0f} doublings of the GPUs that were probed"]
            if forecast.doublings >= FAR_DOUBLINGS
            else []
        ),
    ]


def cost_lines(forecast: Forecast) -> list[str]:
    """Return the cost of a step and of the whole training, as lines."""
    b, cluster, steps = forecast.breakdown, forecast.cluster, forecast.job.steps
    charged = (
        "whole packages"
        if not cluster.device.is_gpu
        else "the modules"
        if cluster.host_W or cluster.supply_loss
        else "the GPUs alone"
    )
    whole = []
    if steps is not None:
        energy = energy_text(steps * b.energy_J / 1e3)
        hours = steps * b.step_time_s / 3600
        whole = [f"  the whole training, {steps:,} steps: {hours:,.3g} h and {energy}"]
    return [
        f"  {b.step_time_s:.4g} s a step, {b.power_W:,.0f} W ({charged}), "
        f"{energy_text(b.energy_J / 1e3)} a step"
        + (f", devices at {b.clock_MHz:.0f} MHz" if cluster.device.is_gpu and b.clock_MHz else ""),
        *whole,
        *(_corrected_lines(forecast) if forecast.corrected else []),
    ]


def breakdown_lines(forecast: Forecast) -> list[str]:
    """Return where the time and the energy of a step go, as lines."""
    return [
        *share_lines(
            "Where the time of a step goes (the busiest stage)", forecast.breakdown.time_s, "s"
        ),
        "",
        *share_lines(
            "Where the energy of a step goes (the whole job)", forecast.breakdown.joules, "J"
        ),
    ]


class PlanView(AnswerExtra):
    """AnswerExtra of plans, which also reads their runs."""

    PROTOCOL = 1
    first_probes = staticmethod(probes_of_plan)

    def answer_of(self, run: RunFolder) -> Answer:
        """Return the answer of a plan's run."""
        return plan_result(load_spec(run, ()), read_plan(run.path))

    def opening_lines(self, answer: Answer) -> list[str]:
        """Return the doubts of a plan."""
        return doubt_lines(answer.plan.doubts if answer.plan else ())

    def answer_lines(self, answer: Answer) -> list[str]:
        """Return the sizes and the assumptions of a plan; empty for a study."""
        if answer.plan is None:
            return []
        return [
            *size_lines(answer),
            _counted(answer.plan),
            *large_lines(answer),
            *states_lines(answer.job),
            *_assumed(answer.job),
        ]

    def summary_lines(self, answer: Answer) -> list[str]:
        """Return the lines of the answer, and the probes that would test the plan."""
        return [*self.answer_lines(answer), *probe_lines(answer)]


VIEW = PlanView()

"""One probe on this node, from the request to the record.

A probe is one launch: ranks are forked, warmed up, measured under each live setting in random order
(the first of several once more at the end, so that drift shows), and ended. Whatever went wrong
becomes a `Failure` in the record, with the last lines of the log as evidence.

A live setting is put in force by the governor (clocks) and by the program (the rest). Every setting
names the values of all declared live knobs, so that none is left over from the one before it. A
knob that refuses its value, or that reads back as another, costs its setting and not the launch.

`Probe` is derived from for ranks on several nodes (`tuner.cluster.multi_node`) and for a whole
training (`tuner.deploy.train`), which override its public methods.
"""

from __future__ import annotations

import contextlib
import math
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import dump_fields
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knob_declarations import Knob
from tuner.workload.hook import GROUPS
from tuner.workload.node.clocks.base import (
    AppliedSettings,
    Governor,
    GovernorError,
    SetByOthers,
    UnsupportedKnob,
)
from tuner.workload.node.host import family
from tuner.workload.node.measure.measurement import (
    LONGER,
    AgreedWindow,
    Agreement,
    Levels,
    drift_of,
    measurement,
    reached,
)
from tuner.workload.node.measure.statistics import Reached, Window, compilation_s
from tuner.workload.node.measure.stragglers import (
    ForeignLoad,
    HostWatch,
    Straggler,
    device_state,
    sentence,
    stragglers,
)
from tuner.workload.node.measure.window import Conductor, DeviceWatch, ProbeFailed, most_steps
from tuner.workload.node.meters import Meter, MeterError, Reading
from tuner.workload.node.meters.base import Timeline, device_states
from tuner.workload.node.platforms import platform_of
from tuner.workload.node.rank_group import NoReply, Ranks, ServerError
from tuner.workload.node.rank_launch import (
    Place,
    ProbeNode,
    RankLaunch,
    bounded_logs,
    reserved_port,
)
from tuner.workload.node.rank_server import control_socket
from tuner.workload.records.probe import (
    LONG_STEP_S,
    Failure,
    Measurement,
    NextSettings,
    PowerSample,
    ProbeRecord,
    ProbeRequest,
    UnappliedSetting,
    WindowPolicy,
)
from tuner.workload.records.trace import (
    partial_record,
    save_partial,
    write_phase,
    write_power_samples,
)
from tuner.workload.scripts.evidence import batches_seen
from tuner.workload.scripts.script_job import COMPILE, ScriptJob
from tuner.workload.scripts.torch_knobs import differs_from_today

#: Processes that a command starts at once reach their first steps this far apart, seconds.
LEAST_WAIT_S = 2.0
#: A second training has this long to begin after a first of a few steps, seconds.
SECOND_LIMIT_S = 60.0


def failure_of(
    error: ServerError | InputError | MeterError | GovernorError | OSError,
    log_tail: Callable[[], str],
) -> Failure:
    """Return the failure of a probe that this error ended."""
    if isinstance(error, NoReply):  # a build that takes too long, or a machine that hangs
        return Failure("node", f"ranks could not be started: {error}", log_tail())
    if isinstance(error, ServerError):
        detail = error.detail or log_tail()
        return Failure("crash", f"ranks could not be started: {error}", detail)
    if isinstance(error, InputError):
        return Failure("refused", str(error))
    action = "hold the probe's files" if isinstance(error, OSError) else "be metered or set"
    return Failure("node", f"the node cannot {action}: {error}")


def ops_needed(launch: Settings, job: TrainingJob | None = None) -> tuple[str, ...]:
    """Return the DeepSpeed ops, by builder name, that a launch of a job compiles and loads."""
    if job is not None and not job.on_deepspeed:
        return ()
    places = [launch.get(name, "none") for name in ("optimizer_offload", "parameter_offload")]
    adam = ("CPUAdamBuilder",) if places[0] != "none" else ()
    return (*adam, "AsyncIOBuilder") if "nvme" in places else adam


def prepare_ops(
    node: ProbeNode,
    request: ProbeRequest,
    environment: dict[str, Any],
    enter: Callable[[str], None],
) -> None:
    """Import the frameworks and build the ops of a launch, both once a machine.

    A build is a phase that `enter` shows; `environment` notes its seconds, also of a failed one.
    """
    ops = ops_needed(request.launch, node.job)
    began_s = time.monotonic()
    if building := node.server.missing_ops(ops):
        names = ", ".join(name.removesuffix("Builder") for name in building)
        enter(f"building DeepSpeed's {names}, once a machine")
    try:
        node.prepare(ops)
    finally:
        if building:
            environment["built_s"] = time.monotonic() - began_s


def measured_levels(
    node: ProbeNode, request: ProbeRequest, timeline: Timeline, nodes: int
) -> Levels:
    """Measure the idle power before a launch; return it with the limit of the lease's devices."""
    meter, device = timeline.meter, node.cluster.device
    # Cores draw at once what they draw when idle, so the first probe tells it, and nobody waits for
    # it before the command is started; GPUs are cool only once.
    later = request.inspects and not device.is_gpu
    idle_s = 0.0 if later else request.window.idle_s
    idle_W = node.idle.measure(meter, idle_s, node.cancelled.wait, samples=lambda: timeline.samples)
    most_W = math.inf
    if meter.info.scope == "gpu":
        limits_W = [live.get("power_limit_W") for live in request.live]
        each_W = max([device.max_W, *(w for w in limits_W if isinstance(w, int | float))])
        most_W = each_W * node.cluster.devices_per_node * nodes
    return Levels(idle_W, node.idle.sampled_W, most_W)


def keep_so_far(
    node: ProbeNode, request: ProbeRequest, measurements: Sequence[Measurement]
) -> None:
    """Save a probe's measurements so far, if the node keeps them for a driver that may die."""
    if node.keep:
        save_partial(node.run_dir, partial_record(request, measurements, node.meter.info))


def keep_timeline(
    run_dir: Path,
    probe_id: str,
    timeline: Timeline,
    *,
    since_s: float,
    phases: Sequence[tuple[float, str]],
) -> dict[str, Any]:
    """Stop a timeline and write its samples; return notes for the record's environment."""
    notes: dict[str, Any] = {}
    samples = timeline.stop()
    try:
        write_power_samples(run_dir, probe_id, samples, since_s=since_s, phases=phases)
    except OSError as error:  # only a picture is lost
        notes["power_samples"] = f"not written: {error}"
    return {**notes, "power_samples_lost": timeline.lost}


def drift_flags(measurements: Sequence[Measurement], *, of_power: bool) -> list[str]:
    """Return the flags of windows whose probe drifted, or was not checked for it."""
    drift = drift_of(measurements, of_power=of_power)
    if drift is None:
        return ["drift was not checked: no setting was measured twice"]
    return [f"drift: {drift.sentence}"] if drift.notable else []


def found_stragglers(
    conductor: Conductor,
    samples: Sequence[PowerSample],
    host: HostWatch,
    *,
    ranks: int,
    nodes: int,
    each: int,
) -> list[Straggler]:
    """Return the ranks that others waited for, with the causes that devices and hosts show.

    Args:
        each: devices of a node.
    """
    conductor.arrivals.close(conductor.done)
    seen = [device_states(sample) for sample in samples]
    on_node = ranks // nodes
    states = {
        rank: host.state(
            device_state(rank, device, seen, str(rank // on_node) if nodes > 1 else "")
        )
        for rank, device in enumerate(devices_in_use(nodes, each, ranks))
    }
    return stragglers(conductor.arrivals, states)


def devices_in_use(nodes: int, each: int, ranks: int) -> list[int]:
    """Return the device of each rank by its number among those of all nodes."""
    return [node * each + rank for node in range(nodes) for rank in range(ranks // nodes)]


def peak_bytes(peaks: Sequence[Mapping[str, int]], held_bytes: int | None = None) -> int | None:
    """Return the memory of the fullest rank, or that held on the fullest device, if more."""
    values = [peak.get("device_bytes", peak.get("host_bytes", 0)) for peak in peaks]
    if held_bytes and any("device_bytes" in peak for peak in peaks):
        values.append(held_bytes)
    return max(values) if values else None


def run_first_steps(conductor: Conductor, first_step_s: float) -> None:
    """Run the steps that the hook counts besides the first; fewer if they are long or it ends.

    A process that trains beside the ranks has as long as these had to reach its first step.
    """
    conductor.wait_for_others(max(LEAST_WAIT_S, first_step_s))
    try:
        while conductor.done < GROUPS and sum(conductor.run(1)) < LONG_STEP_S:
            pass
    except ProbeFailed:
        if not conductor.ended_by_itself:
            raise
        conductor.require_one_training(SECOND_LIMIT_S)


def require_batches(conductor: Conductor, job: TrainingJob, configuration: Configuration) -> None:
    """Check that the ranks train the batches of the configuration; ProbeFailed if they do not."""
    if not job.counts_batches:
        return
    if conductor.done < GROUPS:
        conductor.run(GROUPS - conductor.done)
    seen = batches_seen(conductor.facts)
    wanted = configuration.micro_batch, configuration.accumulation(job.global_batch)
    if seen.steps and (seen.micro_batch, seen.accumulation) != wanted:
        found = f"{seen.micro_batch} samples x {seen.accumulation} backward passes a step"
        wanted_text = f"{wanted[0]} x {wanted[1]}"
        raise ProbeFailed(
            Failure("refused", f"each rank trains {found} where {wanted_text} are to be measured")
        )


#: Folders of torch through which an error of a compiled model comes.
_COMPILERS = ("torch/_dynamo/", "torch/_inductor/")


def compared(job: TrainingJob, configuration: Configuration) -> ScriptJob | None:
    """Return the job if the first steps of a launch are compared with today's, else None."""
    return job if isinstance(job, ScriptJob) and job.compares(configuration) else None


def todays_steps(conductor: Conductor, job: TrainingJob, configuration: Configuration) -> str:
    """Return how the first steps differ from today's, where a knob is proven by them; "" if not."""
    if (script := compared(job, configuration)) is None:
        return ""
    if conductor.done < GROUPS:
        conductor.run(GROUPS - conductor.done)
    return differs_from_today(script, configuration, conductor.facts)


@dataclass(frozen=True)
class SettingWindow:
    """A measurement of the setting that is in force.

    Attributes:
        competitors: configurations by which a window may be beaten, and then ends early.
    """

    conductor: Conductor
    meter: Meter
    timeline: Timeline
    competitors: Sequence[Reached] = ()

    def agreed(
        self,
        agreement: Agreement,
        policy: WindowPolicy,
        step_time_s: float,
        *,
        left_s: float,
        keep: Callable[[AgreedWindow], None],
    ) -> AgreedWindow:
        """Measure a window, once more if its figures differ and there is time; return it.

        `left_s` is the time that the probe has left; a window whose repetition fails goes to
        `keep`.
        """
        window = self._measure(policy, step_time_s)
        if not self.meter.info.independent:
            return AgreedWindow(window)

        def again(longer: WindowPolicy) -> Window:
            try:
                return self._measure(longer, step_time_s)
            except ProbeFailed:
                keep(AgreedWindow(window))
                raise

        in_time = left_s - window.length_s > 1.5 * LONGER * window.length_s
        return agreement.settle(window, policy, again if in_time else None)

    def _measure(self, policy: WindowPolicy, step_time_s: float) -> Window:
        return self.conductor.measure(
            self.meter,
            policy,
            step_time_s,
            samples=lambda: self.timeline.samples,
            competitors=self.competitors,
        )


def apply_live(
    governor: Governor,
    set_live: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    knobs: Sequence[Knob],
    live: Settings,
    *,
    ranks: int,
) -> AppliedSettings | UnappliedSetting:
    """Put a live setting in force while the ranks wait at a boundary, and confirm it.

    Args:
        set_live: sets knobs by every rank's program, and returns what each answers.
    """
    own = {knob.name: knob for knob in knobs if knob.live and knob.name in live}
    rest = Settings({name: value for name, value in live.items() if name not in own})
    try:
        applied = governor.apply(rest, ranks=ranks)
    except UnsupportedKnob as error:
        return UnappliedSetting(live, str(error), unsupported=(error.knob,))
    except SetByOthers as error:
        return UnappliedSetting(live, str(error))
    if not own:
        return applied
    replies = set_live({name: knob.native(live[name]) for name, knob in own.items()})
    notes = list(applied.notes)
    for reply in replies:
        if "refused" in reply:
            return UnappliedSetting(live, str(reply["refused"]))
    for name, knob in own.items():
        read = [reply.get("read", {}).get(name) for reply in replies]
        if all(value is None for value in read):
            notes.append(f"{name} was set by the script, and nothing reads it back")
        for value in read:
            if value is not None and not knob.reads_as(value, live[name]):
                return UnappliedSetting(
                    live, f"{name} was set to {live[name]}, and reads {value!r}"
                )
    settings = Settings({**applied.settings, **{name: live[name] for name in own}})
    return AppliedSettings(settings, tuple(notes))


class Probe:
    """One launch, from the request to the record; `nodes` is the number of nodes of its ranks."""

    nodes = 1

    def __init__(
        self, node: ProbeNode, request: ProbeRequest, launch: RankLaunch | None = None
    ) -> None:
        self.node, self.request = node, request
        self.launch = launch or RankLaunch(node, request)
        self.meter, self.governor = node.meter, node.governor
        self.measurements: list[Measurement] = []
        self.environment = self.launch.environment
        self.ports = contextlib.ExitStack()  # reserved until rank 0 has met the others
        self._next_settings: NextSettings | None = None
        self._missed: list[UnappliedSetting] = []
        self._agreement = Agreement(Levels())
        ranks = self.launch.configuration.world_size
        self._devices_in_use = devices_in_use(self.nodes, node.cluster.devices_per_node, ranks)
        self._platform = platform_of(node.cluster)
        self._devices = DeviceWatch(self._platform)
        self._phases: list[tuple[float, str]] = []
        self._group: Ranks | None = None
        self._launch_s = 0.0
        self._peak_bytes: int | None = None
        self._began_s = 0.0

    def run(self, next_settings: NextSettings | None = None) -> ProbeRecord:
        """Run the probe; whatever goes wrong becomes the record's failure."""
        self._next_settings = next_settings
        started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._began_s = time.monotonic()
        self._enter("")  # an earlier session may have been killed in this probe
        opened = closed = Reading(self._began_s, 0.0)
        failure: Failure | None = None
        timeline: Timeline | None = None
        try:
            if self.request.purpose != "training":  # which nobody measures
                self._devices.require_free()
            # What is compiled once a machine is no time or energy of the probe that needs it first.
            try:
                prepare_ops(self.node, self.request, self.environment, self._enter)
            finally:
                self._began_s = time.monotonic()
            opened = closed = self.meter.read()
            timeline = self.open_timeline()
            levels = measured_levels(self.node, self.request, timeline, self.nodes)
            self._agreement = Agreement(levels)
            with bounded_logs(self.launch.folder, self.environment):
                self._launch_and_measure(timeline)
        except ProbeFailed as failed:
            failure = replace(self._devices.cause(failed.failure), log_tail=self.log_tail())
            if not self.measurements and self._fails_to_compile(failure):
                self._leave_uncompiled(failure.message)
        except (ServerError, InputError, MeterError, GovernorError, OSError) as error:
            failure = failure_of(error, self.log_tail)
        except BaseException:
            # An interrupt, or a fault of ours: no record, but nothing may stay changed either.
            if timeline is not None:
                timeline.stop()
            with contextlib.suppress(GovernorError):
                self.governor.restore()
            raise
        try:
            self.governor.restore()
        except GovernorError as error:
            failure = failure or Failure("node", f"after the measurement: {error}")
        try:
            closed = self.meter.read()
        except MeterError as error:
            failure = failure or Failure("node", f"after the measurement: {error}")
        self._enter("")
        if timeline is not None:
            folder, probe = self.node.run_dir, self.request.probe_id
            self.environment |= keep_timeline(
                folder, probe, timeline, since_s=self._began_s, phases=self._phases
            )
        return self._record(failure, started_at, closed.energy_J - opened.energy_J)

    def _record(self, failure: Failure | None, started_at: str, energy_J: float) -> ProbeRecord:
        if seconds := compilation_s(self._phases, self._began_s, time.monotonic()):
            self.environment["compilation_s"] = seconds
        if failure is None and self._missed and not self.measurements:
            failure = Failure("not_taken", self._missed[0].message)
        return ProbeRecord(
            request=self.request,
            measurements=tuple(
                replace(m, peak_memory_bytes=self._peak_bytes) for m in self.measurements
            ),
            meter=self.meter.info,
            failure=failure,
            launch_s=self._launch_s,
            wall_s=time.monotonic() - self._began_s,
            energy_J=energy_J,
            started_at=started_at,
            host=socket.gethostname(),
            environment=self.environment,
            idle_W=self._agreement.levels.counted_idle_W,
            waiting_devices=self.nodes * self.node.cluster.devices_per_node
            - self.launch.configuration.world_size,
            drift=drift_of(self.measurements, of_power=self.meter.info.has_energy),
            missed=tuple(self._missed),
        )

    def _launch_and_measure(self, timeline: Timeline) -> None:
        request = self.request
        listener, address, remove = control_socket()
        group = None
        try:
            group = self._group = self.spawn(listener, address)
            self._enter("launching")
            if not request.inspects:  # while the ranks start, and not beside a window
                import_module("scipy.special")
            conductor = Conductor(
                group,
                deadline_s=self._began_s + request.time_limit_s,
                limits=request.limits(self.node.step_limit_s),
                explain_exit=self.explain_exit,
                cancelled=self.node.cancelled.is_set,
                most_steps=self._most_steps,
            )
            self._phases = conductor.phases
            conductor.first_step()
            self.ports.close()
            self._enter("warming up")
            self.run_steps(conductor, timeline)
            self._enter("ending")
            held = self._platform.memory_held(family(self.node.server.pid))
            conductor.finish()
            self._peak_bytes = peak_bytes(conductor.peaks, held)
        finally:
            self.ports.close()
            if group is not None:
                group.kill()
                self._platform.wait_for_release()
                self.node.idle.was_busy()
            remove()

    def _most_steps(self, step_time_s: float) -> int:
        request = self.request
        most = math.ceil(request.time_limit_s / step_time_s)
        if request.extendable:
            return most
        return min(most, most_steps(request.window, len(request.live), step_time_s))

    def _enter(self, phase: str) -> None:
        write_phase(self.node.run_dir, self.request.probe_id, phase)

    def open_timeline(self) -> Timeline:
        """Start to sample power."""
        state = None if self.meter.info.tells_clocks else self.governor.delivered
        return Timeline(self.meter, state=state)

    def spawn(self, listener: socket.socket, address: str) -> Ranks:
        """Start the ranks, which report to the socket at `address`."""
        ranks = self.launch.configuration.world_size
        if self.launch.job.as_it_stands:
            return self.launch.start_command(listener, address)
        # The ranks of one node talk over loopback, whatever its name resolves to.
        port = self.ports.enter_context(reserved_port())
        place = Place(0, ranks, ("127.0.0.1", port), "lo")
        return self.node.server.spawn(self.launch.specs(address, place), listener)

    def explain_exit(self, rank: int, code: int) -> Failure:
        """Explain an exit without an exception."""
        return self.launch.explain_exit(rank, code)

    def run_steps(self, conductor: Conductor, timeline: Timeline) -> None:
        """Lead the ranks from the first step to the last; an inspection ends after a few."""
        if self.request.inspects:
            self.environment["first_step_s"] = self.since_request_s
            try:
                run_first_steps(conductor, self.since_request_s)
            finally:
                self.environment["steps_done"] = conductor.done
            self.environment["facts"] = conductor.facts
            return
        warm = conductor.warm_up()
        require_batches(conductor, self.node.job, self.launch.configuration)
        self._require_todays_steps(conductor)
        self.environment["warm_up_steps"] = len(warm.step_times_s)
        notes = [] if warm.stable else ["step time was not stable after the warm-up"]
        host = HostWatch()
        pids = dict(enumerate(self._group.pids if self._group and self.nodes == 1 else ()))
        host.read(pids)
        self.measure(conductor, timeline, warm.step_time_s, notes)
        host.read(pids)
        self._flag_stragglers(conductor, timeline.samples, host)

    def _require_todays_steps(self, conductor: Conductor) -> None:
        if why := todays_steps(conductor, self.node.job, self.launch.configuration):
            self._leave_uncompiled(why)
            raise ProbeFailed(Failure("not_taken", why))

    def _fails_to_compile(self, failure: Failure) -> bool:
        compiles = compared(self.node.job, self.launch.configuration) is not None
        through = any(frame.startswith(_COMPILERS) for frame in failure.frames)
        return compiles and failure.kind == "crash" and through

    def _leave_uncompiled(self, why: str) -> None:
        self._missed += [
            UnappliedSetting(live, why, unsupported=(COMPILE,)) for live in self.request.live
        ]

    def measure(
        self, conductor: Conductor, timeline: Timeline, step_time_s: float, notes: Sequence[str]
    ) -> None:
        """Visit the live settings, and those by which the request is extended."""
        order = random.Random(self.request.probe_id)
        left, visits = list(self.request.live), list[Settings]()
        while left:
            # In random order, so that drift (temperature) is not mistaken for the clock's effect.
            order.shuffle(left)
            for live in left:
                step_time_s = self._visit(live, conductor, timeline, step_time_s, notes)
            visits += left
            left = self._further()
        if self.request.window.check_drift and len(set(visits)) == len(visits) > 1:
            # The first once more: what differs now is drift, for the setting is the same.
            if self._time_for_one_more():
                self._visit(visits[0], conductor, timeline, step_time_s, notes)
            of_power = self.meter.info.has_energy
            self._flag(drift_flags(self.measurements, of_power=of_power))

    def _further(self) -> list[Settings]:
        request = self.request
        if not (self._next_settings and request.extendable and self._time_for_one_more()):
            return []
        more = self._next_settings(request, tuple(self.measurements))
        if more:
            longer = replace(request, live=(*request.live, *more))
            self.node.check(longer, self.nodes)
            self.request = longer
        return list(more)

    @property
    def since_request_s(self) -> float:
        """Seconds from the request until now."""
        return time.monotonic() - self._began_s

    @property
    def left_s(self) -> float:
        """Seconds until the probe's time is up."""
        return self.request.time_limit_s - self.since_request_s

    def _time_for_one_more(self) -> bool:
        window = self.request.window
        longest_s = max((m.window_s for m in self.measurements), default=window.max_s)
        return self.left_s > 1.5 * (window.settle_s + max(window.min_s, longest_s))

    def _flag(self, flags: Sequence[str]) -> None:
        self.measurements = [replace(m, flags=(*m.flags, *flags)) for m in self.measurements]

    def _flag_stragglers(
        self, conductor: Conductor, samples: Sequence[PowerSample], host: HostWatch
    ) -> None:
        ranks, each = self.launch.configuration.world_size, self.node.cluster.devices_per_node
        found = found_stragglers(conductor, samples, host, ranks=ranks, nodes=self.nodes, each=each)
        if found:
            self.environment["stragglers"] = [dump_fields(straggler) for straggler in found]
            self._flag([f"straggler: {sentence(straggler)}" for straggler in found])

    def _visit(
        self,
        live: Settings,
        conductor: Conductor,
        timeline: Timeline,
        step_time_s: float,
        notes: Sequence[str] = (),
    ) -> float:
        """Measure a live setting, once more if another process changed one within the window."""
        first = len(self.measurements)
        for last in (False, True):
            notes = (*notes, *self.governor.foreign())
            step_time_s = self._measure(live, conductor, timeline, step_time_s, notes)
            if not (changed := self.governor.foreign()):
                break
            again = not last and self._time_for_one_more()
            self._take_back(first, changed, drop=again)
            if not again:
                break
            notes = (*notes, *changed)
        return step_time_s

    def _take_back(self, first: int, changed: Sequence[str], *, drop: bool) -> None:
        """Flag the measurements of a window within which a setting changed, or drop them.

        Those that ask for what was changed are no data points.
        """
        kept = self.measurements[:first]
        for each in self.measurements[first:] if not drop else ():
            on_gpus = self.node.cluster.device.is_gpu
            if "power_limit_W" in each.live or ("clock_MHz" in each.live and not on_gpus):
                self._missed.append(UnappliedSetting(each.live, "; ".join(changed)))
            else:
                kept.append(replace(each, flags=(*each.flags, *changed)))
        self.measurements = kept
        keep_so_far(self.node, self.request, self.measurements)

    def _measure(
        self,
        live: Settings,
        conductor: Conductor,
        timeline: Timeline,
        step_time_s: float,
        notes: Sequence[str],
    ) -> float:
        policy = self.request.window
        number = len(self.measurements) + len(self._missed) + 1
        of = max(number, len(self.request.live))
        self._enter(f"measuring {number} of {of}" + (f" at {live.short}" if live else ""))
        ranks = self.launch.configuration.world_size
        applied = apply_live(
            self.governor, conductor.set_live, self.node.job.knobs, live, ranks=ranks
        )
        if isinstance(applied, UnappliedSetting):
            self._missed.append(applied)
            return step_time_s
        if live:
            conductor.settle(policy.settle_s, step_time_s)
        if not self._launch_s:
            self._launch_s = time.monotonic() - self._began_s
        contention = self._group and self._platform.contention(self._group.pids)

        def keep(agreed: AgreedWindow) -> None:
            share = contention.share() if contention else 0.0
            foreign = ForeignLoad(share, self._devices.others(family(self.node.server.pid)))
            outcome = measurement(
                live,
                agreed.window,
                policy,
                settings=applied.settings,
                began_s=self._began_s,
                notes=(*notes, *applied.notes, *foreign.notes, *agreed.notes),
                resolution_s=self.meter.resolution_s,
                independent=self.meter.info.independent and agreed.compared,
                devices=self._devices_in_use,
            )
            if isinstance(outcome, UnappliedSetting):
                self._missed.append(outcome)
                return
            self.measurements.append(foreign.widened(outcome))
            keep_so_far(self.node, self.request, self.measurements)

        front = self.request.front
        competitors = (*front, *(reached(m) for m in self.measurements)) if front else ()
        window = SettingWindow(conductor, self.meter, timeline, competitors)
        agreed = window.agreed(self._agreement, policy, step_time_s, left_s=self.left_s, keep=keep)
        keep(agreed)
        return agreed.window.step_time_s

    def log_tail(self) -> str:
        """Return the last lines of the ranks' logs."""
        return self.launch.log_tail()

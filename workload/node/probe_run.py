"""One probe on this node, from the request to the record.

A probe is one launch: ranks are forked, warmed up, measured under each live setting in random order
(the first of several once more at the end, so that drift shows), and ended. Whatever went wrong
becomes a `Failure` in the record, with the last lines of the log as evidence.
"""

from __future__ import annotations

import contextlib
import math
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.typed_json import dump_fields
from tuner.workload.node.clocks.base import GovernorError
from tuner.workload.node.device_watch import DeviceWatch
from tuner.workload.node.host import family
from tuner.workload.node.live_settings import apply_live
from tuner.workload.node.measure.agreement import AgreedWindow, Agreement, Levels
from tuner.workload.node.measure.foreign_load import ForeignLoad
from tuner.workload.node.measure.measurement import drift_of, measurement, reached
from tuner.workload.node.measure.statistics import compilation_s
from tuner.workload.node.measure.stragglers import HostWatch, sentence
from tuner.workload.node.measure.window import Conductor, ProbeFailed, most_steps
from tuner.workload.node.meters import MeterError, Reading
from tuner.workload.node.meters.timeline import Timeline
from tuner.workload.node.platforms import platform_of
from tuner.workload.node.probe_checks import (
    devices_in_use,
    drift_flags,
    failure_of,
    found_stragglers,
    inspect_cause,
    keep_so_far,
    keep_timeline,
    measured_levels,
    peak_bytes,
    prepare_ops,
    require_batches,
)
from tuner.workload.node.rank_group import Ranks, ServerError
from tuner.workload.node.rank_launch import (
    Place,
    ProbeNode,
    RankLaunch,
    bounded_logs,
    reserved_port,
)
from tuner.workload.node.rank_server import control_socket
from tuner.workload.node.setting_window import SettingWindow
from tuner.workload.records.probe import (
    Continuation,
    Failure,
    Measurement,
    PowerSample,
    ProbeRecord,
    ProbeRequest,
    UnappliedSetting,
)
from tuner.workload.records.trace import write_phase


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
        self._next_settings: Continuation | None = None
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

    def run(self, next_settings: Continuation | None = None) -> ProbeRecord:
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
            self.lead(conductor, timeline)
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

    def lead(self, conductor: Conductor, timeline: Timeline) -> None:
        """Lead the ranks from the first step to the last; an inspection ends after the first."""
        if self.request.inspects:
            self.environment["first_step_s"] = self.since_request_s
            try:
                inspect_cause(conductor, self.since_request_s)
            finally:
                self.environment["steps_done"] = conductor.done
            self.environment["facts"] = conductor.facts
            return
        warm = conductor.warm_up()
        require_batches(conductor, self.node.job, self.launch.configuration)
        self.environment["warm_up_steps"] = len(warm.step_times_s)
        notes = [] if warm.stable else ["step time was not stable after the warm-up"]
        host = HostWatch()
        pids = dict(enumerate(self._group.pids if self._group and self.nodes == 1 else ()))
        host.read(pids)
        self.measure(conductor, timeline, warm.step_time_s, notes)
        host.read(pids)
        self._flag_stragglers(conductor, timeline.samples, host)

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

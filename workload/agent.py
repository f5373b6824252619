"""The node agent: runs one probe on this node and says what it cost. The real `Runner`.

All metering and clock control is here, outside the training processes: it costs the training
nothing, needs privileges in one place and outlives a rank that dies. A probe is one launch: ranks
are forked, warmed up, measured under each live setting in random order (the first of several once
more at the end, so that drift shows), and ended; whatever went wrong becomes a `Failure` in the
record, with the last lines of the log as evidence.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from search_spaces.cluster import Cluster
from search_spaces.configuration import Configuration, Settings
from search_spaces.errors import InputError, InvalidConfiguration
from search_spaces.job import TrainingJob
from search_spaces.rules import broken_rules, unrunnable
from workload.deepspeed_config import ops_needed, render_deepspeed_config, training_arguments
from workload.governor import Governor, GovernorError, open_governor
from workload.host import Neighbours
from workload.logs import bounded_logs
from workload.measured import drift_of, measurement
from workload.meters import Meter, MeterError, Reading, open_beside, open_meter
from workload.meters.timeline import Timeline
from workload.probe import Failure, GoOn, Measurement, MeterInfo, Missed, ProbeRecord, ProbeRequest
from workload.ranks import PRELOAD, Ranks, RankServer, RankSpec, ServerError, control_socket
from workload.script import ScriptJob, Start, imported_frameworks
from workload.trace import put_by, unfinished, write_power_samples
from workload.window import Conductor, ProbeFailed

__all__ = [
    "LocalRunner",
    "Place",
    "Probe",
    "explain_exit",
    "free_port",
    "oom_kills",
    "refused",
    "training_program",
]

#: A step that takes longer than this is a hang. The first step may compile and allocate.
STEP_LIMIT_S = 120.0
LOG_TAIL_LINES = 20


def training_program() -> Path:
    """The built-in training program's file."""
    return Path(__file__).with_name("program") / "train.py"


class LocalRunner:
    """Runs probes on this node, one at a time.

    Args:
        job: what is trained.
        cluster: this machine, as `workload.machine.detect_cluster` describes it.
        run_dir: logs go to `run_dir/probes/<id>`, power samples to `run_dir/trace/power`.
        meter, governor: opened for this cluster where not given; closed with the runner.
        beside: meters of other scopes, read at the same boundaries; those that this node offers by
            default, and none beside a meter that was given.
        say: told what takes long ("importing torch and deepspeed"), a sentence each.
        fresh: start a new interpreter for each rank instead of forking one that has imported.
        step_limit_s: a step longer than this is a hang.
        program: the training script; the built-in one by default.
        keep: put by what was measured after every window, in the run folder, until whoever asked
            has the whole record (`workload.trace.keep_record`).
    """

    def __init__(
        self,
        job: TrainingJob,
        cluster: Cluster,
        *,
        run_dir: str | Path,
        meter: Meter | None = None,
        governor: Governor | None = None,
        beside: Sequence[Meter] | None = None,
        say: Callable[[str], None] = lambda sentence: None,
        fresh: bool = False,
        step_limit_s: float = STEP_LIMIT_S,
        program: Path | None = None,
        keep: bool = False,
    ) -> None:
        self.keep = keep
        self._job, self._cluster = job, cluster
        self._run_dir = Path(run_dir).resolve()
        # A meter that was handed in is not ours to open again.
        self._open_meter = None if meter is not None else lambda: open_meter(cluster)
        self._meter = meter or open_meter(cluster)
        if beside is None:
            beside = open_beside(self._meter) if meter is None else ()
        self._beside = tuple(beside)
        self._governor = governor or open_governor(cluster)
        self._say, self._fresh, self._step_limit_s = say, fresh, step_limit_s
        self._program = program or training_program()
        accelerator = "cuda" if cluster.device.type == "cuda" else "cpu"
        self._server = RankServer(
            env={"DS_ACCELERATOR": accelerator},
            # A user's own script may be plain torch.
            needs=("torch",) if isinstance(job, ScriptJob) else PRELOAD,
            optional=[
                *_modelling_code(job.model),
                *(imported_frameworks(job.words, job.cwd) if isinstance(job, ScriptJob) else ()),
            ],
        )
        self._cancel = threading.Event()
        self._one_at_a_time = threading.Lock()
        self.meter: MeterInfo = self._meter.info

    def prepare(self, ops: Sequence[str] = ()) -> float:
        """Import the frameworks, and build and load DeepSpeed ops, ahead of the first probe.

        Returns:
            Seconds it took: near 0 when it was done before.

        Raises:
            InputError: the interpreter lacks torch or DeepSpeed.
            ServerError: an op cannot be built, or the fork server fails.
        """
        began = time.monotonic()
        if not self._server.alive:
            self._say("importing torch, deepspeed and transformers once for all probes")
            self._server.start()
        if ops:
            self._say(f"loading {', '.join(ops)} (compiled once a machine, up to a minute)")
            self._server.load_ops(ops)
        return time.monotonic() - began

    @property
    def resolution_s(self) -> float:
        """The energy counter's update period, seconds."""
        return self._meter.resolution_s

    def turn_to(self, job: TrainingJob) -> None:
        """Probe another job from here on, with ranks of the same server."""
        self._job = job

    def cancel(self) -> None:
        """End the running probe, from another thread; its record says "cancelled"."""
        self._cancel.set()

    def run(self, request: ProbeRequest) -> ProbeRecord:
        """Run one probe. Never raises for a probe that fails.

        Raises:
            InputError: the request names a knob or value that cannot be, here or at all.
        """
        return self.run_as(Probe, request)

    def run_open(self, request: ProbeRequest, go_on: GoOn) -> ProbeRecord:
        """As `run`, with the launch kept up while `go_on` says what else to visit in it."""
        return self.run_as(Probe, request, go_on=go_on)

    def run_as(
        self,
        kind: Callable[[LocalRunner, ProbeRequest], Probe],
        request: ProbeRequest,
        *,
        nodes: int = 1,
        go_on: GoOn | None = None,
    ) -> ProbeRecord:
        """Run one probe of a kind that does more than visit the live settings.

        Args:
            kind: makes the probe.
            request: what is asked.
            nodes: how many nodes its ranks may take.
            go_on: says what an open request visits besides.

        Raises:
            InputError: as `run`.
        """
        self.check(request, nodes=nodes)
        with self._one_at_a_time:
            self._cancel.clear()
            try:
                self._renew_meter()
            except MeterError as error:
                failure = Failure("node", f"the node cannot be metered: {error}")
                return ProbeRecord(request, (), self.meter, failure)
            probe = kind(self, request)
            probe.go_on = go_on
            return probe.run()

    def check(self, request: ProbeRequest, *, nodes: int = 1) -> None:
        """Raise where the request cannot be run here, or on so many nodes.

        Raises:
            InvalidConfiguration: it cannot; every reason is told.
        """
        for configuration in request.configurations():
            reasons = [
                *broken_rules(configuration, self._job, self._cluster),
                *refused(configuration, self._job),
            ]
            have = nodes * self._cluster.devices_per_node
            if configuration.world_size > have:
                where = "one node" if nodes == 1 else f"{nodes} nodes"
                reasons.append(
                    f"the probe was given {where} with {have} devices, and needs "
                    f"{configuration.world_size}; probes across nodes run on Ray (--ray)"
                )
            if reasons:
                raise InvalidConfiguration(configuration.key, reasons)

    def _renew_meter(self) -> None:
        """A meter that lost joules stays broken on purpose; the next probe gets a new one."""
        try:
            self._meter.read()
        except MeterError:
            if self._open_meter is not None:
                self._meter.close()
                self._meter = self._open_meter()
        for other in self._beside:
            try:
                other.read()
            except MeterError as error:  # what is only shown beside must not cost a probe
                self._say(f"no energy by {other.info.name} from here on: {error}")
                other.close()
                self._beside = tuple(meter for meter in self._beside if meter is not other)

    def close(self) -> None:
        self._cancel.set()
        self._server.close()
        try:
            self._governor.close()
        except GovernorError as error:
            self._say(f"what was changed on the GPUs could not all be put back: {error}")
        for meter in (self._meter, *self._beside):
            meter.close()


@dataclass(frozen=True)
class Place:
    """Where the ranks of one node stand among all ranks of a probe.

    Attributes:
        first: the first one's number.
        ranks: how many stand here.
        master: address and port at which rank 0 gathers them.
        interface: the network interface that they talk over; empty leaves it to the framework.
    """

    first: int
    ranks: int
    master: tuple[str, int]
    interface: str = ""


class Probe:
    """One launch, from the request to the record.

    Attributes:
        nodes: how many nodes its ranks stand on.
        go_on: asked what an open request visits besides; None ends it with its own list.
    """

    nodes = 1
    go_on: GoOn | None = None

    def __init__(self, runner: LocalRunner, request: ProbeRequest, *, part: str = "") -> None:
        """`part` is the folder below the probe's for the files of one node's share."""
        self._runner, self._request = runner, request
        self._job, self._cluster = runner._job, runner._cluster
        self._meter, self._governor = runner._meter, runner._governor
        self._configuration = Configuration(request.launch)
        self._folder = runner._run_dir / "probes" / request.probe_id / part
        self._measurements: list[Measurement] = []
        self._missed: list[Missed] = []
        self._idle_W: float | None = None
        self._phases: list[tuple[float, str]] = []
        self._environment: dict[str, Any] = {}
        self._group: Ranks | None = None
        self._launch_s = 0.0
        self._peak_bytes: int | None = None
        self._began_s = 0.0

    def run(self) -> ProbeRecord:
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._began_s = time.monotonic()
        opened = closed = Reading(self._began_s, 0.0)
        failure: Failure | None = None
        timeline: Timeline | None = None
        try:
            opened = closed = self._meter.read()
            timeline = self.open_timeline()
            self._measure_idle()
            with bounded_logs(self._folder, self._environment):
                self._launch_and_measure(timeline)
        except ProbeFailed as failed:
            failure = replace(failed.failure, log_tail=self.log_tail())
        except ServerError as error:
            detail = error.detail or self.log_tail()
            failure = Failure("crash", f"ranks could not be started: {error}", detail)
        except InputError as error:
            failure = Failure("refused", str(error))
        except (MeterError, GovernorError) as error:
            failure = Failure("node", f"the node cannot be metered or set: {error}")
        except OSError as error:
            failure = Failure("node", f"the node cannot hold the probe's files: {error}")
        except BaseException:
            # An interrupt, or a fault of ours: no record, but nothing may stay changed either.
            if timeline is not None:
                timeline.stop()
            with contextlib.suppress(GovernorError):
                self._governor.restore()
            raise
        try:
            self._governor.restore()
        except GovernorError as error:
            failure = failure or Failure("node", f"after the measurement: {error}")
        try:
            closed = self._meter.read()
        except MeterError as error:
            failure = failure or Failure("node", f"after the measurement: {error}")
        if timeline is not None:
            try:
                write_power_samples(
                    self._runner._run_dir,
                    self._request.probe_id,
                    timeline.stop(),
                    since_s=self._began_s,
                    phases=self._phases,
                )
            except OSError as error:  # it is a picture: what was measured stands without it
                self._environment["power_samples"] = f"not written: {error}"
            self._environment["power_samples_lost"] = timeline.lost
        if failure is None and self._missed and not self._measurements:
            failure = Failure("not_taken", self._missed[0].message)
        return ProbeRecord(
            request=self._request,
            measurements=tuple(
                m if self._peak_bytes is None else replace(m, peak_memory_bytes=self._peak_bytes)
                for m in self._measurements
            ),
            meter=self._meter.info,
            failure=failure,
            launch_s=self._launch_s,
            wall_s=time.monotonic() - self._began_s,
            energy_J=closed.energy_J - opened.energy_J,
            started_at=started_at,
            host=socket.gethostname(),
            environment=self._environment,
            idle_W=self._idle_W,
            waiting_devices=self.nodes * self._cluster.devices_per_node
            - self._configuration.world_size,
            drift=drift_of(self._measurements),
            missed=tuple(self._missed),
        )

    def _measure_idle(self) -> None:
        """What the scope draws before the ranks start."""
        if self._request.window.idle_s <= 0:
            return
        opened = self._meter.boundary(opens=True)
        self._runner._cancel.wait(self._request.window.idle_s)
        closed = self._meter.boundary(opens=False)
        if closed.time_s > opened.time_s:
            self._idle_W = (closed.energy_J - opened.energy_J) / (closed.time_s - opened.time_s)

    def _launch_and_measure(self, timeline: Timeline) -> None:
        request, server = self._request, self._runner._server
        if not server.alive:
            self._runner.prepare()
        server.load_ops(ops_needed(request.launch))
        listener, address, remove = control_socket()
        group = None
        try:
            oom_before = oom_kills()
            group = self._group = self.spawn(listener, address)
            conductor = Conductor(
                group,
                deadline_s=self._began_s + request.time_limit_s,
                step_limit_s=self.step_limit_s,
                explain_exit=lambda rank, code: self.explain_exit(rank, code, oom_before),
                cancelled=self._runner._cancel.is_set,
            )
            self._phases = conductor.phases
            conductor.first_step()
            self.lead(conductor, timeline)
            conductor.finish()
            self._peak_bytes = _peak(conductor.peaks)
        finally:
            if group is not None:
                group.kill()
            remove()

    def open_timeline(self) -> Timeline:
        """Begin to sample power."""
        return Timeline(self._meter, beside=self._runner._beside)

    def spawn(self, listener: socket.socket, address: str) -> Ranks:
        """Start the ranks, which report to the socket at `address`."""
        ranks = self._configuration.world_size
        # The ranks of one node talk over loopback, whatever its name resolves to.
        place = Place(0, ranks, ("127.0.0.1", free_port()), "lo")
        return self._runner._server.spawn(self.rank_specs(address, place), listener)

    def explain_exit(self, rank: int, code: int, oom_kills_before: int) -> Failure:
        """What an exit that no exception explained means."""
        return explain_exit(rank, code, oom_kills_before)

    @property
    def step_limit_s(self) -> float:
        """A step longer than this is a hang."""
        return self._runner._step_limit_s

    def lead(self, conductor: Conductor, timeline: Timeline) -> None:
        """What happens between the first step and the last: warm up, then measure."""
        warm = conductor.warm_up()
        self._environment["warm_up_steps"] = len(warm.step_times_s)
        unstable = () if warm.stable else ("step time was not stable after the warm-up",)
        self.measure(conductor, timeline, warm.step_time_s, unstable)

    def measure(
        self, conductor: Conductor, timeline: Timeline, step_time_s: float, notes: Sequence[str]
    ) -> None:
        """Visit the live settings, and what an open request is told to visit besides."""
        order = random.Random(self._request.probe_id)
        left, visits = list(self._request.live), list[Settings]()
        while left:
            # In random order, so that drift (temperature) is not mistaken for the clock's effect.
            order.shuffle(left)
            for live in left:
                step_time_s = self._visit(live, conductor, timeline, step_time_s, notes)
            visits += left
            left = self._further()
        if self._request.window.check_drift and len(set(visits)) == len(visits) > 1:
            # The first once more: what differs now is drift, for the setting is the same.
            if self._time_for_one_more():
                self._visit(visits[0], conductor, timeline, step_time_s, notes)
            self._flag_drift()

    def _further(self) -> list[Settings]:
        """What else to visit while the launch is up; the ranks wait for the answer."""
        request = self._request
        if self.go_on is None or not request.open or not self._time_for_one_more():
            return []
        more = self.go_on(request, tuple(self._measurements))
        if more:
            longer = replace(request, live=(*request.live, *more))
            self._runner.check(longer, nodes=self.nodes)
            self._request = longer
        return list(more)

    def _time_for_one_more(self) -> bool:
        """Whether another visit fits into the probe's time limit, with half as much to spare."""
        window = self._request.window
        left_s = self._began_s + self._request.time_limit_s - time.monotonic()
        longest_s = max((m.window_s for m in self._measurements), default=window.max_s)
        return left_s > 1.5 * (window.settle_s + max(window.min_s, longest_s))

    def _flag_drift(self) -> None:
        drift = drift_of(self._measurements)
        if drift is None:
            sentence = "drift was not checked: no setting was measured twice"
        elif drift.notable:
            sentence = f"drift: {drift.sentence}"
        else:
            return
        self._measurements = [replace(m, flags=(*m.flags, sentence)) for m in self._measurements]

    def _visit(
        self,
        live: Settings,
        conductor: Conductor,
        timeline: Timeline,
        step_time_s: float,
        notes: Sequence[str] = (),
    ) -> float:
        """Measure one live setting; its step time."""
        policy = self._request.window
        applied = self._governor.apply(live, ranks=self._configuration.world_size)
        if live:
            conductor.settle(policy.settle_s, step_time_s)
        if not self._launch_s:
            self._launch_s = time.monotonic() - self._began_s
        neighbours = self._neighbours()
        window = conductor.measure(
            self._meter,
            policy,
            step_time_s,
            samples=lambda: timeline.samples,
            beside=self._runner._beside,
        )
        disturbed = neighbours.note() if neighbours is not None else ""
        told = measurement(
            live,
            window,
            policy,
            settings=applied.settings,
            began_s=self._began_s,
            notes=(*notes, *applied.notes, *([disturbed] if disturbed else [])),
            resolution_s=self._meter.resolution_s,
            independent=self._meter.info.independent,
        )
        if isinstance(told, Missed):
            self._missed.append(told)
        else:
            self._measurements.append(told)
            if self._runner.keep:
                so_far = unfinished(self._request, self._measurements, self._meter.info)
                put_by(self._runner._run_dir, so_far)
        return window.length_s / len(window.step_times_s)

    def _neighbours(self) -> Neighbours | None:
        """Watches who else uses the cores, where cores are the devices."""
        if self._cluster.device.type != "cpu" or self._group is None:
            return None
        return Neighbours(self._group.pids, os.sched_getaffinity(0))

    def _start(self) -> Start:
        """Write the probe's files, and say how its ranks start."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self._job, ScriptJob):
            return self._job.start(self._configuration, self._folder)
        job_file, config_file = self._folder / "job.json", self._folder / "ds_config.json"
        config = render_deepspeed_config(
            self._configuration, self._job, nvme_path=self._cluster.nvme_path
        )
        job = self._job.at(self._configuration)
        job_file.write_text(json.dumps(job.to_json(), indent=1))
        config_file.write_text(json.dumps(config, indent=1))
        argv = (
            str(self._runner._program),
            "--job",
            str(job_file),
            "--deepspeed_config",
            str(config_file),
            # More steps than any window needs: the agent says when it is enough.
            "--steps",
            "1000000000",
            *training_arguments(self._configuration),
        )
        return Start(argv, str(self._folder), {}, config, {"HF_HUB_OFFLINE": "1"})

    def rank_specs(self, address: str, place: Place) -> list[RankSpec]:
        """Describe the ranks that stand on this node."""
        start = self._start()
        world = self._configuration.world_size
        self._environment |= {
            "deepspeed_config": start.config,
            "argv": list(start.words),
            "ranks": world,
            "fresh_interpreter": self._runner._fresh,
        }
        cores = sorted(os.sched_getaffinity(0))
        on_cpu = self._cluster.device.type == "cpu"
        specs = []
        for rank in range(place.first, place.first + place.ranks):
            log = self._folder / f"rank{rank}.log"
            log.unlink(missing_ok=True)
            specs.append(
                RankSpec(
                    argv=start.argv(rank, world, rank - place.first),
                    env={**self._rank_env(rank, world, place), **start.env},
                    log=str(log),
                    cwd=start.cwd,
                    # A device of a CPU cluster is one core: a rank keeps to it.
                    cpus=(cores[rank % len(cores)],) if on_cpu else (),
                    address=address,
                    fresh=self._runner._fresh,
                    options=start.options,
                )
            )
        return specs

    def _rank_env(self, rank: int, world: int, place: Place) -> Mapping[str, str]:
        env = self._runner._server.env | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - place.first),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(place.ranks),
            "LOCAL_SIZE": str(place.ranks),
            "MASTER_ADDR": place.master[0],
            "MASTER_PORT": str(place.master[1]),
            "GLOO_SOCKET_IFNAME": place.interface,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        if not place.interface:
            del env["GLOO_SOCKET_IFNAME"]
        env.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # only the fork server needs it
        if self._cluster.device.type != "cpu":
            env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // max(place.ranks, 1)))
        return env

    def log_tail(self) -> str:
        """The last lines of the ranks' logs, the rank that said most about an error first."""
        tails = []
        for path in sorted(self._folder.glob("rank*.log")):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 16384))
                lines = file.read().decode(errors="replace").splitlines()
            tails.append("\n".join(lines[-LOG_TAIL_LINES:]))
        tails.sort(key=lambda text: "Traceback" not in text and "Error" not in text)
        return tails[0] if tails else ""


def refused(configuration: Configuration, job: TrainingJob) -> list[str]:
    """What the program, ours or the user's, cannot be given."""
    if isinstance(job, ScriptJob):
        return job.refused(configuration)
    return unrunnable(configuration, job)


def _modelling_code(model: Mapping[str, Any]) -> list[str]:
    """Modules of transformers that build a model, and its parts where it has several."""
    parts = [model, *(part for part in model.values() if isinstance(part, Mapping))]
    kinds = [str(part.get("model_type")) for part in parts]
    # A part's type may say which half of a family it is.
    names = {kind.removesuffix("_text").removesuffix("_vision_model") for kind in kinds}
    return [f"transformers.models.{name}.modeling_{name}" for name in sorted(names)]


def _peak(peaks: Sequence[Mapping[str, int]]) -> int | None:
    """The fullest rank's peak: of the device where it has memory of its own, else of the host."""
    values = [peak.get("device_bytes", peak.get("host_bytes", 0)) for peak in peaks]
    return max(values) if values else None


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory; 0 where it does not say."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def explain_exit(rank: int, code: int, oom_kills_before: int) -> Failure:
    """What an exit that no exception explained means."""
    if code == -9 and oom_kills() > oom_kills_before:
        return Failure(
            "out_of_memory", f"the kernel killed rank {rank}: the host ran out of memory"
        )
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return Failure("crash", f"rank {rank} {how}")


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens at on this node."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])

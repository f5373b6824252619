"""The real `Runner`: measures probes on this node, one at a time.

All metering and clock control is here, outside the training processes: it costs the training
nothing, needs privileges in one place and outlives a rank that dies.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError, InvalidConfiguration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.rules import why_it_cannot_run
from tuner.search_spaces.safe_files import private_folder
from tuner.workload.node.clocks.base import Governor, GovernorError
from tuner.workload.node.host import CpuContention, family
from tuner.workload.node.measure.stragglers import ForeignLoad
from tuner.workload.node.meters import Meter, MeterError
from tuner.workload.node.platforms import platform_of
from tuner.workload.node.probe_run import Probe
from tuner.workload.node.rank_group import ServerError
from tuner.workload.node.rank_launch import ProbeNode
from tuner.workload.node.rank_server import ImportsAhead, RankServer
from tuner.workload.records.probe import (
    Failure,
    MeterInfo,
    NextSettings,
    ProbeRecord,
    ProbeRequest,
    Runner,
)
from tuner.workload.scripts.job import LaunchableJob, launchable


class LocalRunner(Runner):
    """Runner of probes on this node, one at a time.

    Meter and governor are opened if not given, and closed with the runner; tests give theirs, and
    alone set `new_interpreter`, `step_limit_s` and `program`. With `keep`, what was
    measured is saved after every window, until the driver has the whole record.
    """

    def __init__(
        self,
        job: TrainingJob,
        cluster: Cluster,
        *,
        run_dir: str | Path,
        meter: Meter | None = None,
        governor: Governor | None = None,
        announce: Callable[[str], None] = lambda sentence: None,
        new_interpreter: bool = False,
        step_limit_s: float | None = None,
        program: Path | None = None,
        keep: bool = False,
    ) -> None:
        self._platform = platform = platform_of(cluster)
        started = launchable(job, cluster, program)
        if why := started.why_not_here():
            raise InputError(why)
        # The caller's own meter is not opened again.
        self._open_meter = None if meter is not None else lambda: platform.open_meter(cluster)
        meter = meter or platform.open_meter(cluster)
        self._announce = announce
        self._notified = ""  # why ranks are not forked
        self._ahead: ImportsAhead | None = None
        self._one_at_a_time = threading.Lock()
        self.meter: MeterInfo = meter.info
        self.node = ProbeNode(
            job=job,
            cluster=cluster,
            run_dir=Path(run_dir).resolve(),
            server=RankServer(
                env={"DS_ACCELERATOR": platform.accelerator},
                platform=platform,
                needs=started.needed_modules,
                optional=_imports_of(job, started),
                packages=started.imported_packages,
            ),
            meter=meter,
            governor=governor or platform.open_governor(cluster, meter.info),
            program=program,
            new_interpreter=new_interpreter,
            keep=keep,
            step_limit_s=step_limit_s,
            cancelled=threading.Event(),
            prepare=self._prepare,
            check=self.check,
        )
        self.set_job(job)

    def import_ahead(self, modules: Sequence[str]) -> None:
        """Import torch and what else ranks will probably need, on a core that is left idle."""
        packages = {"torch", "setuptools", *(name.partition(".")[0] for name in modules)}
        server = RankServer(
            env={"DS_ACCELERATOR": self._platform.accelerator},
            platform=self._platform,
            needs=("torch",),
            optional=modules,
            packages=packages,
        )
        self._ahead = ImportsAhead(server)

    def prepare(self, ops: Sequence[str] = ()) -> float:
        """Import the frameworks and load DeepSpeed ops; return the seconds that it took.

        InputError if torch or DeepSpeed is missing, cannot use the GPUs, or an op cannot be built.
        """
        try:
            self._take_ahead()
            return self._prepare(ops)
        except ServerError as error:
            raise InputError(f"this node cannot prepare for training: {error}") from error

    def _take_ahead(self) -> None:
        """Use the server that has begun to import, if this one lacks imports; else end it."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        lacks, begun = self.node.server.to_import, ahead.take()
        if begun is None or not lacks:
            ahead.close()
            return
        begun.succeed(self.node.server)
        self.node = replace(self.node, server=begun)

    def _prepare(self, ops: Sequence[str] = ()) -> float:
        began, cluster, server = time.monotonic(), self.node.cluster, self.node.server
        if not server.alive:
            private_folder(self.node.run_dir)
            # No refusal: a probe may have fewer ranks than the machine has devices.
            for warning in self._platform.warnings(cluster.devices_per_node):
                self._announce(warning)
        if not server.alive or server.to_import:
            if names := self._main_packages():
                self._announce(f"importing {names} once for all probes")
            server.start()
            build, accelerator = server.torch, self._platform.accelerator
            if build and accelerator != "cpu" and (why := self._platform.why_not_torch(build)):
                server.close()
                raise InputError(f"nothing can be trained on the GPUs of this machine: {why}")
        if missing := self.node.server.missing_ops(ops):
            self._announce(f"loading {', '.join(missing)} (compiled once a machine, some minutes)")
            self.node.server.load_ops(missing)
        if (why := self.node.server.fork_unsafe) and why != self._notified:
            self._notified = why
            self._announce(f"ranks start afresh here, some seconds more for each probe ({why})")
        return time.monotonic() - began

    def _main_packages(self) -> str:
        # The packages that take long to import, for a sentence.
        main = ("torch", "deepspeed", "transformers", "accelerate", "lightning")
        names = [name for name in main if name in self.node.server.to_import]
        return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))

    def foreign_load(self, seconds: float) -> ForeignLoad:
        """Watch this machine for a time, while no probe runs; return what others use of it."""
        cores = CpuContention({os.getpid(), *family(os.getpid())}, os.sched_getaffinity(0))
        if self.node.cancelled.wait(seconds):
            return ForeignLoad()
        try:
            device = "; ".join(self._platform.busy())
        except (InputError, MeterError):  # the probe reports it
            device = ""
        return ForeignLoad(cores.share(), device)

    def set_job(self, job: TrainingJob) -> None:
        """Probe another job from here on, with ranks of the same server."""
        self.node = replace(self.node, job=job)

    def set_job_and_imports(self, job: TrainingJob, *, keep: bool = False) -> None:
        """Probe another job from here on, for whose ranks `prepare` imports what they lack."""
        started = launchable(job, self.node.cluster, self.node.program)
        self.node.server.add_imports(
            started.needed_modules, _imports_of(job, started), started.imported_packages
        )
        self.node = replace(self.node, job=job, keep=keep)

    def run_for_job(self, job: TrainingJob, request: ProbeRequest) -> ProbeRecord:
        """Run one probe of another job, to which later ones belong, too."""
        self.set_job(job)
        return self.run(request)

    def cancel(self) -> None:
        """End the running probe, from another thread; its record is "cancelled"."""
        self.node.cancelled.set()

    def run_interactive(self, request: ProbeRequest, next_settings: NextSettings) -> ProbeRecord:
        return self.run(request, next_settings=next_settings)

    def run(
        self,
        request: ProbeRequest,
        kind: Callable[[ProbeNode, ProbeRequest], Probe] = Probe,
        *,
        nodes: int = 1,
        next_settings: NextSettings | None = None,
    ) -> ProbeRecord:
        """Run one probe. Never raises for one that fails; InputError if a knob or value cannot
        be."""
        self.check(request, nodes)
        with self._one_at_a_time:
            self.node.cancelled.clear()
            started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
            began_s, host = time.monotonic(), socket.gethostname()
            try:
                self.renew_meter()
            except MeterError as error:
                failure = Failure("node", f"the node cannot be metered: {error}")
                record = ProbeRecord(request, (), self.meter, failure, host=host)
                wall_s = time.monotonic() - began_s
                return replace(record, started_at=started_at, wall_s=wall_s)
            return kind(self.node, request).run(next_settings)

    def check(self, request: ProbeRequest, nodes: int = 1) -> None:
        """Raise InvalidConfiguration, with every reason, if a request cannot run on these nodes."""
        for configuration in request.configurations():
            reasons = list(why_it_cannot_run(configuration, self.node.job, self.node.cluster))
            reasons += launchable(self.node.job, self.node.cluster).refused(configuration)
            have = nodes * self.node.cluster.devices_per_node
            if configuration.world_size > have:
                where = "one node" if nodes == 1 else f"{nodes} nodes"
                reasons.append(
                    f"the probe was given {where} with {have} devices, and needs "
                    f"{configuration.world_size}; probes across nodes run on Ray (--ray)"
                )
            if reasons:
                raise InvalidConfiguration(configuration.short, reasons)

    def renew_meter(self) -> None:
        """Replace a meter that has lost joules; MeterError if the new one cannot be opened."""
        try:
            self.node.meter.read()
        except MeterError:
            if self._open_meter is not None:
                self.node.meter.close()
                renewed = self._open_meter()
                if gone := _gpus_of(self.node.meter) - _gpus_of(renewed):  # their energy would lack
                    renewed.close()
                    raise MeterError(f"{', '.join(sorted(gone))} cannot be used any more") from None
                self.node = replace(self.node, meter=renewed)

    def close(self) -> None:
        """End the ranks and their server, put back the clocks and close the meter."""
        self.node.cancelled.set()
        if self._ahead is not None:
            self._ahead.close()
        self.node.server.close()
        try:
            self.node.governor.close()
        except GovernorError as error:
            self._announce(f"what was changed on the GPUs could not all be put back: {error}")
        self.node.meter.close()


def _gpus_of(meter: Meter) -> set[str]:
    return {gpu.uuid for gpu in getattr(meter, "gpus", ())}


def _imports_of(job: TrainingJob, started: LaunchableJob) -> list[str]:
    return [*_modelling_code(job.model), *started.imported_modules]


def _modelling_code(model: Mapping[str, Any]) -> list[str]:
    parts = [model, *(part for part in model.values() if isinstance(part, Mapping))]
    kinds = [str(part.get("model_type")) for part in parts]
    # A part's type may say which half of a family it is.
    names = {kind.removesuffix("_text").removesuffix("_vision_model") for kind in kinds}
    return [f"transformers.models.{name}.modeling_{name}" for name in sorted(names)]

"""Executor of this process: one probe at a time."""

from __future__ import annotations

import math
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.executors.base import Executor, ExecutorKind, Opening
from tuner.formatting import duration, percent
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.workload.records.probe import (
    Announce,
    Failure,
    Measurement,
    NextSettings,
    ProbeRecord,
    ProbeRequest,
    Runner,
)
from tuner.workload.records.trace import partial_record, save_partial

if TYPE_CHECKING:
    from tuner.workload.node.measure.stragglers import ForeignLoad
    from tuner.workload.node.runner import LocalRunner


#: Length of one look at what others use of the machine, seconds; the number of looks in a row that
#: have to be quiet after one that was not; and the time between two words on it.
LOOK_S, QUIET_LOOKS, TOLD_EVERY_S = 1.0, 5, 60.0


def run_safely(
    runner: Runner,
    request: ProbeRequest,
    keep_in: str | Path | None = None,
    *,
    next_settings: NextSettings | None = None,
) -> ProbeRecord:
    """Run one probe; an exception becomes a failed record.

    The record is kept in `keep_in`, and before further settings are chosen what was measured until
    then. A runner that has `keep` (`LocalRunner`) saves each window there in between.
    """
    partial = ProbeRecord(request, (), runner.meter)

    def keep_and_continue(
        longer: ProbeRequest, measurements: Sequence[Measurement]
    ) -> Sequence[Settings]:
        nonlocal partial
        partial = partial_record(longer, measurements, runner.meter)
        save_partial(keep_in, partial)
        return next_settings(longer, measurements) if next_settings is not None else ()

    try:
        if next_settings is None or not request.extendable:
            record = runner.run(request)
        else:
            record = runner.run_interactive(request, keep_and_continue)
    except InputError as error:
        record = replace(partial, failure=Failure("refused", str(error)))
    except Exception as error:
        kind = type(error).__name__
        failure = Failure("crash", f"the runner raised {kind}: {error}", traceback.format_exc())
        record = replace(partial, failure=failure)
    save_partial(keep_in, record)
    return record


class InlineExecutor:
    """Executor of one probe at a time: `wait` runs the oldest request."""

    def __init__(self, runner: Runner, *, keep_in: str | Path | None = None) -> None:
        self._runner, self._keep_in = runner, keep_in
        self._queue: deque[tuple[ProbeRequest, NextSettings | None]] = deque()
        self.meter = runner.meter
        self.capacity = 1

    @property
    def in_flight(self) -> int:
        return len(self._queue)

    def submit(self, request: ProbeRequest, next_settings: NextSettings | None = None) -> None:
        self._queue.append((request, next_settings))

    def wait(self, timeout_s: float | None = None) -> ProbeRecord | None:
        """Run the oldest request to its end, which its own time limit bounds, not `timeout_s`."""
        if not self._queue:
            return None
        request, next_settings = self._queue[0]
        try:
            return run_safely(self._runner, request, self._keep_in, next_settings=next_settings)
        finally:
            self._queue.popleft()

    def wait_until_quiet(
        self, limit_s: float, announce: Announce, stopped: Callable[[], bool]
    ) -> float:
        """Wait until others leave the cores and GPUs of this node; return the seconds it took.

        Where the first look finds them quiet, nothing is waited for; else they have to stay so for
        `QUIET_LOOKS`, for a load that comes and goes is one. It ends after `limit_s`, or as soon as
        the search is `stopped`.
        """
        began_s, told_s, quiet = time.monotonic(), -math.inf, 0
        watch: Callable[[float], ForeignLoad] | None
        if (watch := getattr(self._runner, "foreign_load", None)) is None:
            return 0.0
        load: ForeignLoad | None = None  # of the last look that was not quiet
        while True:
            look = watch(LOOK_S)
            waited_s = time.monotonic() - began_s
            load, quiet = (look, 0) if look.notes else (load, quiet + 1)
            if load is None or quiet >= QUIET_LOOKS:
                if told_s >= 0:
                    announce(f"quiet after {duration(waited_s)}")
                return waited_s
            if stopped():
                return waited_s
            if waited_s >= limit_s:
                announce(f"{_others(load)} after {duration(waited_s)}: measured all the same")
                return waited_s
            if not quiet and waited_s - told_s >= TOLD_EVERY_S:
                told_s = waited_s
                announce(
                    f"waiting until this machine is quiet: {_others(load)}; at most "
                    f"{duration(limit_s - waited_s)}"
                )

    def now_s(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        self._queue.clear()
        self._runner.close()


def _others(load: ForeignLoad) -> str:
    # "other processes use 63 % of the cores, GPU 0 is used by process 4242"
    cores = f"other processes use {percent(load.share)} of the cores"
    return ", ".join(filter(None, [cores * load.on_cores, load.device]))


class ThisNode:
    """One node, this one, whose fork server serves a script's inspection and its search alike.

    The runner is made by the first `runner`, and closed with the node unless an executor of
    `executor` has closed it before.
    """

    def __init__(self) -> None:
        self._runner: LocalRunner | None = None

    def runner(
        self,
        job: TrainingJob,
        cluster: Cluster,
        *,
        run_dir: Path,
        announce: Announce,
        keep: bool = False,
    ) -> LocalRunner:
        """Return the runner of a job, to be prepared; InputError if this node cannot be used.

        With `keep`, what was measured is saved after every window.
        """
        from tuner.workload.node.runner import LocalRunner

        if self._runner is None:
            self._runner = LocalRunner(job, cluster, run_dir=run_dir, announce=announce)
        self._runner.set_job_and_imports(job, keep=keep)
        return self._runner

    def executor(
        self, job: TrainingJob, cluster: Cluster, *, run_dir: Path, announce: Announce
    ) -> InlineExecutor:
        """Return an executor of a job's probes; InputError if this node cannot be used."""
        from tuner.workload.node.facts import inspect_node

        # What its GPUs do is no reason against its cores.
        facts = inspect_node(environ={**os.environ, **cluster.device.hiding})
        if refused := facts.refusals(cluster):
            raise InputError(refused[0])
        if warning := facts.warning(cluster):
            announce(f"warning: {warning}")
        runner = self.runner(job, cluster, run_dir=run_dir, announce=announce, keep=True)
        runner.prepare()
        return InlineExecutor(runner, keep_in=run_dir)

    def close(self) -> None:
        """End the ranks and their server, put back the clocks and close the meter."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None


class Inline(ExecutorKind):
    """The executor of one node: one probe after the other, as processes of this machine."""

    PROTOCOL = 1

    def phrase(self, cluster: Cluster, address: str | None) -> str:
        return "processes of this machine, one probe at a time"

    def open(self, opening: Opening) -> Executor:
        here = opening.node or ThisNode()
        try:
            return here.executor(
                opening.job, opening.cluster, run_dir=opening.run_dir, announce=opening.announce
            )
        except BaseException:
            here.close()
            raise


INLINE = Inline()

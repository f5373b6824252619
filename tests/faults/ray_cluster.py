"""Faults of a Ray cluster: an agent is killed, and a whole node, while it measures or waits.

Two nodes of one machine, the real executor and its agents; only the training is replaced, by the
analytic model after a moment in which its agent can be killed. The study has to go on with what is
left, or with the agent that takes the dead one's place.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.harness import (
    Fault,
    LedgerRunner,
    Outcome,
    in_interpreter,
    marked,
    outcome_of,
    run_of,
    wait_gone,
)
from tests.support.studies import FormulaRunner
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.job import TrainingJob
from tuner.workload.records.probe import ProbeRequest, Runner
from tuner.workload.records.trace import read_trace

#: Probes of a study, and how long each takes, seconds.
PROBES, PROBE_S = 6, 1.0


#: Strikes the cluster where the probe is the one to strike: the cluster, its second node, the probe
#: and the process that has it. Whether it struck.
Strike = Callable[[Any, Any, str, int], bool]


def runner(
    job: TrainingJob, cluster: Cluster, run_dir: str, model: type[FormulaRunner] = FormulaRunner
) -> Runner:
    """Make the runner that every agent answers by; it notes which process has which probe."""
    folder = Path(run_dir).parents[1]

    def before(request: ProbeRequest) -> None:
        with (folder / "started").open("a") as file:
            file.write(f"{request.probe_id} {os.getpid()} {time.monotonic()}\n")
        time.sleep(PROBE_S)

    return LedgerRunner(model(), folder / "ledger", before)


def started(folder: Path) -> list[tuple[str, int, float]]:
    path = folder / "started"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(probe, int(pid), float(at_s)) for probe, pid, at_s in lines]


def _study(folder: Path, strike: Strike, *, asked: bool = False) -> int:
    """Run a study on a cluster of its own, and offer each probe to `strike` until it strikes.

    With `asked` it is each that waits for what else to visit, in a study that goes on.
    """
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's own spelling
    from dataclasses import replace

    import ray
    from ray.cluster_utils import Cluster as RayCluster

    import tuner
    from tests.faults import open_launch
    from tests.support.studies import LONG_JOB
    from tuner.cluster.executor import RayExecutor
    from tuner.search_spaces.cluster import load_cluster
    from tuner.study.loop import SearchLoop

    # Without handlers of signals: the thread that strikes cannot add a node with them.
    nodes = RayCluster(initialize_head=True, head_node_args={"num_cpus": 2}, shutdown_at_exit=False)
    # With GPUs, which nobody looks for, the second is the only one that is used.
    second = nodes.add_node(num_cpus=2, num_gpus=8 * asked)
    # Of which there are two: two in flight.
    cluster = replace(load_cluster(open_launch.CLUSTER if asked else "cpu-2"), nodes=1)
    executor = RayExecutor(
        LONG_JOB,
        cluster,
        run_dir=folder / "runs" / "study",
        address=nodes.address,
        make_runner=runner,
        announce=print,
    )

    def offered(probe: str) -> bool:
        pid = next(pid for name, pid, _ in reversed(started(folder)) if name == probe)
        if not strike(nodes, second, probe, pid):
            return False
        (folder / "struck").write_text(str(time.monotonic()))
        return True

    def watch() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if any(offered(probe) for probe, _, _ in reversed(started(folder))):
                return
            time.sleep(0.02)

    space = folder / "space.toml"
    space.write_text(open_launch.SPACE)
    if asked:
        SearchLoop._next_settings = open_launch.struck_when_asked(offered)  # type: ignore[method-assign]
    else:
        threading.Thread(target=watch, daemon=True).start()
    result = tuner.optimize(
        LONG_JOB,
        cluster=cluster,
        space=str(space) if asked else "default",
        executor=executor,
        runs_dir=folder / "runs",
        name="study",
        search=tuner.SearchSettings(max_probes=PROBES),
        report=False,
        progress=False,
        on_progress=lambda event: print(event.message) if event.kind == "note" else None,
    )
    print(f"done {result.spent.probes}", flush=True)
    ray.shutdown()
    nodes.shutdown()
    return 0


def _struck(strike: Strike, words: str, folder: Path, *, asked: bool = False) -> Outcome:
    with marked() as mark:
        study = partial(_study, folder, strike, asked=asked)
        child = in_interpreter(study, folder, limit_s=300.0)
    run = run_of(folder)
    if not run.trace.exists():
        return Outcome(wrong=(f"it measured nothing and ended with {child.code}: {child.said}",))
    records = read_trace(run.trace).records
    failures = [record.failure.message for record in records if record.failure]
    kept = [record for record in records if record.failure and record.measurements]
    struck = folder / "struck"
    struck_s = float(struck.read_text()) if struck.exists() else math.inf
    later = [at_s for _, _, at_s in started(folder) if at_s > struck_s]
    return outcome_of(
        folder,
        (struck.exists(), f"no probe came to be struck: {child.said[-600:]}"),
        (child.code == 0, f"it ended with {child.code}: {child.said[-600:]}"),
        (not words or any(words in said for said in failures), f"it said {failures}"),
        # A search that goes on in its launches may have visited everything with fewer.
        (len(records) == PROBES or asked, f"{len(records)} probes were made"),
        (sum(record.ok for record in records) >= PROBES - 2, f"others failed: {failures}"),
        (bool(kept) or not asked, "what the probe had measured was not kept"),
        said="; ".join(failures) or "nothing: no probe was lost",
        processes_left=wait_gone(mark),
        # Of a node's death Ray itself is told by silence, after some ten seconds.
        recovery_s=min(later) - struck_s if later and strike is _kill_agent else None,
    )


def _kill_agent(nodes: Any, second: Any, probe: str, pid: int) -> bool:
    if probe < "p0002":
        return False
    os.kill(pid, signal.SIGKILL)
    return True


def _kill_node(nodes: Any, second: Any, probe: str, pid: int) -> bool:
    """Strike only an agent of the second node: the first holds the cluster together.

    Of any probe, because only the two that begin together are sure to be on a node each: later
    ones wait for one another, and may all go to the first.
    """
    raylet = second.all_processes["raylet"][0].process.pid
    parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]
    if int(parent) != raylet:
        return False
    nodes.remove_node(second, allow_graceful=False)
    return True


def _replace_node(nodes: Any, second: Any, probe: str, pid: int) -> bool:
    """Remove the only node that probes run on, and add another."""
    struck = _kill_node(nodes, second, probe, pid)
    if struck:
        nodes.add_node(num_cpus=2, num_gpus=8)
    return struck


#: (name, strike, words of the failure, whether it strikes while the probe waits to go on).
STRIKES = (
    ("Ray agent killed while it measures", _kill_agent, "the node agent died", False),
    ("Ray node killed while it measures", _kill_node, "node lost", False),
    ("Ray agent killed while its probe waits to go on", _kill_agent, "the node agent died", True),
    ("Ray node killed while its probe waits to go on", _replace_node, "node lost", True),
)
FAULTS: tuple[Fault, ...] = tuple(
    Fault(name, partial(_struck, strike, words, asked=asked), fast=False)
    for name, strike, words, asked in STRIKES
)

"""The Ray executor: real agents and real probes on a Ray of this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import studies as study_tools
from tuner.cluster import agent
from tuner.cluster.agent import NodeStatus
from tuner.cluster.executor import RayExecutor
from tuner.executors.base import Executor
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.workload.node.facts import NodeFacts
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.records.probe import (
    Measurement,
    NextSettings,
    ProbeRecord,
    ProbeRequest,
    WindowPolicy,
)

pytestmark = [pytest.mark.real, pytest.mark.ray]

LAUNCH = Settings(data_parallel=1, micro_batch=4)
QUICK = WindowPolicy(min_s=0.5, max_s=1.0)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayExecutor]:
    executor = RayExecutor(load_job(), detect_cluster(), run_dir=tmp_path_factory.mktemp("run"))
    executor.prepare()
    yield executor
    executor.close()


def test_it_keeps_the_executor_protocol_and_measures(executor: RayExecutor) -> None:
    assert isinstance(executor, Executor)
    assert executor.capacity == 1
    assert executor.wait(0.1) is None
    for number in range(2):
        executor.submit(ProbeRequest(f"p{number}", LAUNCH, window=QUICK))
        assert executor.in_flight == 1
        record = executor.wait()
        assert record.ok, record.failure
        assert record.request.probe_id == f"p{number}"
        assert record.measurements[0].steps >= 3
        assert record.meter == executor.meter
    assert executor.in_flight == 0


def test_an_open_probe_waits_for_its_driver_and_goes_on(executor: RayExecutor) -> None:
    asked = []

    def next_settings(
        request: ProbeRequest, measurements: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        asked.append(len(measurements))
        return (Settings(),) if len(asked) == 1 else ()

    once = replace(QUICK, check_drift=False)
    executor.submit(ProbeRequest("open", LAUNCH, window=once, extendable=True), next_settings)
    record = executor.wait()
    assert record.ok, record.failure
    assert asked == [1, 2]
    assert record.request.live == (Settings(), Settings())
    first, second = record.measurements
    assert second.started_s >= first.started_s + first.window_s
    assert executor.in_flight == 0


def test_a_launch_is_not_kept_up_for_a_driver_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent, "HOLD_S", 0.05)
    answered = []

    def run(next_settings: NextSettings) -> ProbeRecord:
        asked = study_tools.request()
        answered.append(tuple(next_settings(asked, ())))
        return study_tools.record()

    dialogue = agent._Dialogue(run, study_tools.METER)
    assert [dialogue.reports.get(timeout=60)[0] for _ in range(2)] == [False, True]
    assert answered == [()]


def test_a_request_that_cannot_run_comes_back_refused(executor: RayExecutor) -> None:
    executor.submit(ProbeRequest("bad", Settings(data_parallel=1, micro_batch=3), window=QUICK))
    record = executor.wait()
    assert record.failure.kind == "refused"
    assert "global batch" in record.failure.message


def test_a_killed_agent_fails_its_probe_and_is_replaced(executor: RayExecutor) -> None:
    (slot,) = executor.pool.slots
    pid = executor._ray.get(slot.agent.pid.remote())

    def killed_meanwhile(
        request: ProbeRequest, measurements: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        os.kill(pid, signal.SIGKILL)
        return (Settings(),)

    request = ProbeRequest("dies", LAUNCH, window=QUICK, extendable=True)
    executor.submit(request, killed_meanwhile)
    record = executor.wait(120.0)
    assert record.failure.kind == "node"
    assert len(record.measurements) == 1  # what it had told before is not lost
    executor.submit(ProbeRequest("after", LAUNCH, window=QUICK))
    record = executor.wait(120.0)
    assert record.ok, record.failure


def test_an_agent_that_does_not_keep_its_limit_is_stopped(
    executor: RayExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's own limit holds even where the agent's does not."""
    monkeypatch.setattr("tuner.cluster.executor._GRACE_S", -58.0)
    long = WindowPolicy(min_s=120.0, max_s=120.0)
    executor.submit(ProbeRequest("long", LAUNCH, window=long, time_limit_s=60.0))
    record = executor.wait(100.0)
    assert record.failure.kind in ("cancelled", "time_limit")


def test_a_cluster_without_the_devices_is_one_sentence(
    executor: RayExecutor, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="no node of the Ray cluster has 8 GPUs"):
        RayExecutor(load_job(), load_cluster("h200-8"), run_dir=tmp_path)


def test_a_runner_that_only_computes_answers_many_at_once(
    executor: RayExecutor, tmp_path: Path
) -> None:
    """Parts of a node, as GPUs metered one by one would be; what is too many waits its turn."""
    from tuner.simulated.runner import SimulatedRunner

    cluster = replace(detect_cluster(), devices_per_node=1)
    several = RayExecutor(
        load_job(),
        cluster,
        run_dir=tmp_path,
        make_runner=lambda job, cluster, run_dir: SimulatedRunner(job, cluster),
    )
    try:
        assert several.meter.name == "simulated"
        assert several.capacity == detect_cluster().devices_per_node
        names = [f"p{number}" for number in range(5)]
        for name in names:
            several.submit(ProbeRequest(name, LAUNCH, window=QUICK))
        records = [several.wait(60) for _ in names]
        assert sorted(r.request.probe_id for r in records if r is not None and r.ok) == names
        assert several.in_flight == 0
        assert several.wait(0.1) is None
    finally:
        several.close()


def test_nodes_of_another_kind_or_meter_are_left_out(
    executor: RayExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor.pool, "resource", "GPU")
    monkeypatch.setattr(executor.pool, "_cluster", load_cluster("h200-8"))
    other = NodeStatus(NodeFacts("n7", load_cluster("a100-8")), (), executor.meter)
    assert executor.pool.reason_to_refuse(other).endswith("two kinds never share a front")
    same = NodeFacts("n8", load_cluster("h200-8"))
    assert executor.pool.reason_to_refuse(NodeStatus(same, (), executor.meter)) == ""
    module = replace(executor.meter, scope="module")
    assert "is metered by" in executor.pool.reason_to_refuse(NodeStatus(same, (), module))

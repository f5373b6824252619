"""The Ray executor: real agents and real probes on a Ray of this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("deepspeed")

from search_spaces.cluster import load_cluster
from search_spaces.configuration import Settings
from search_spaces.errors import InputError
from search_spaces.job import load_job
from tuner.executors import Executor
from tuner.ray_executor import RayExecutor
from workload.machine import detect_cluster
from workload.probe import ProbeRequest, WindowPolicy

pytestmark = pytest.mark.real

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
        assert record is not None
        assert record.ok, record.failure
        assert record.request.probe_id == f"p{number}"
        assert record.measurements[0].steps >= 3
        assert record.meter == executor.meter
    assert executor.in_flight == 0


def test_a_request_that_cannot_run_comes_back_refused(executor: RayExecutor) -> None:
    executor.submit(ProbeRequest("bad", Settings(data_parallel=1, micro_batch=3), window=QUICK))
    record = executor.wait()
    assert record is not None
    assert record.failure is not None
    assert record.failure.kind == "refused"
    assert "global batch" in record.failure.message


def test_a_killed_agent_fails_its_probe_and_is_replaced(executor: RayExecutor) -> None:
    (agent,) = executor._agents.values()
    pid = executor._ray.get(agent.pid.remote())
    executor.submit(ProbeRequest("dies", LAUNCH, window=WindowPolicy(min_s=60.0, max_s=60.0)))
    time.sleep(2.0)
    os.kill(pid, signal.SIGKILL)
    record = executor.wait(60.0)
    assert record is not None
    assert record.failure is not None
    assert record.failure.kind == "crash"
    executor.submit(ProbeRequest("after", LAUNCH, window=QUICK))
    record = executor.wait(120.0)
    assert record is not None
    assert record.ok, record.failure


def test_an_agent_that_does_not_keep_its_limit_is_stopped(
    executor: RayExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's own limit holds even where the agent's does not."""
    monkeypatch.setattr("tuner.ray_executor._GRACE_S", -58.0)
    long = WindowPolicy(min_s=120.0, max_s=120.0)
    executor.submit(ProbeRequest("long", LAUNCH, window=long, time_limit_s=60.0))
    record = executor.wait(45.0)
    assert record is not None
    assert record.failure is not None
    assert record.failure.kind in ("cancelled", "time_limit")


def test_a_cluster_without_the_devices_is_one_sentence(
    executor: RayExecutor, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="no node of the Ray cluster has 8 GPUs"):
        RayExecutor(load_job(), load_cluster("h200-8"), run_dir=tmp_path)


def test_two_nodes_run_two_probes_at_once(tmp_path: Path) -> None:
    """Ray with two nodes of one core each, on this machine: two probes in flight, one a node."""
    import subprocess
    import sys
    import textwrap

    script = tmp_path / "two_nodes.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os
            os.environ["RAY_worker_niceness"] = "0"
            import ray
            from dataclasses import replace
            from ray.cluster_utils import Cluster as RayCluster
            from search_spaces.configuration import Settings
            from search_spaces.job import load_job
            from tuner.ray_executor import RayExecutor
            from workload.machine import detect_cluster
            from workload.probe import ProbeRequest, WindowPolicy

            nodes = RayCluster(initialize_head=True, head_node_args={{"num_cpus": 1}})
            nodes.add_node(num_cpus=1)
            cluster = replace(detect_cluster(), devices_per_node=1, nodes=2)
            executor = RayExecutor(
                load_job(), cluster, run_dir={str(tmp_path)!r}, address=nodes.address)
            executor.prepare()
            assert executor.capacity == 2, executor.capacity
            window = WindowPolicy(min_s=3.0, max_s=4.0)
            for name in ("a", "b"):
                launch = Settings(data_parallel=1, micro_batch=4)
                executor.submit(ProbeRequest(name, launch, window=window))
            assert executor.in_flight == 2
            records = [executor.wait(), executor.wait()]
            assert all(r.ok for r in records), [r.failure for r in records]
            assert {{r.request.probe_id for r in records}} == {{"a", "b"}}
            executor.close()
            ray.shutdown()
            nodes.shutdown()
            print("two probes, two nodes")
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False
    )
    assert "two probes, two nodes" in done.stdout, done.stderr[-3000:]

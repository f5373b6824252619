"""What an operator of a Ray cluster sees of a search: names of agents and leases, and gauges."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.cluster.own_ray import OwnRay

pytest.importorskip("ray")

SEARCHES = """
import json, os, tempfile, time, urllib.request
from dataclasses import replace
from pathlib import Path
import ray
from tuner.cluster.executor import RayExecutor
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.job import load_job
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.records.probe import ProbeRequest, WindowPolicy

folder = Path(tempfile.mkdtemp()) / "qwen"
cluster = replace(detect_cluster(), devices_per_node=1, nodes=1)
ray.init(address=os.environ["JF_ADDRESS"], log_to_driver=False, logging_level="ERROR")
executor = RayExecutor(load_job(), cluster, run_dir=folder)
executor.prepare()
request = ProbeRequest("p0003", Settings(data_parallel=1, micro_batch=2),
    window=WindowPolicy(min_s=4.0, max_s=8.0))
executor.submit(request)
agents = ray.util.list_named_actors()
leases = [group["name"] for group in ray.util.placement_group_table().values()]
(node,) = ray.nodes()
url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
found, until_s = {}, time.monotonic() + float(os.environ["JF_WAIT_S"])
while time.monotonic() < until_s and len(found) < 3:
    executor.wait(0.5)
    try:
        text = urllib.request.urlopen(url, timeout=5).read().decode()
    except OSError:
        continue
    for line in text.splitlines():
        if "joulefront_" in line and not line.startswith("#"):
            found[line.partition("{")[0]] = "qwen" in line
executor.close()
print("ANSWER " + json.dumps([agents, leases, found]))
"""


@pytest.mark.real
@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(400)
def test_agents_leases_and_gauges_tell_the_run() -> None:
    exports = importlib.util.find_spec("opencensus") is not None  # of ray[default]
    with OwnRay.started() as ray:
        program = ray.python(SEARCHES, JF_WAIT_S="90" if exports else "0")
        out, err = program.communicate(timeout=300)
    assert "ANSWER" in out, err[-3000:]
    agents, leases, gauges = json.loads(out.partition("ANSWER ")[2])
    assert len(agents) == 1
    assert agents[0].startswith("joulefront-qwen-")
    assert leases == ["joulefront-qwen-p0003"]
    names = ("probes", "nodes", "power_watts")
    assert gauges == ({f"ray_joulefront_{name}": True for name in names} if exports else {})

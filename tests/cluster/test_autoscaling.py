"""Nodes that an autoscaler starts for a study: demanded, waited for with a limit, given back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.alone import run_alone, short_folder
from tests.cluster.made_up import Clock
from tuner.api import search_for
from tuner.cluster import head as ray_head
from tuner.cluster.head import Head, NodeDemand
from tuner.cluster.joining import Survey
from tuner.doctor.dry_run import dry_run
from tuner.search_spaces.errors import InputError
from tuner.study.request import StudyRequest

pytest.importorskip("ray")


class ScalingCluster:
    """A cluster of nodes of eight GPUs, beside a head without, that may start further ones."""

    def __init__(self, clock: Clock, here: int, most: int, starts_s: float = 10.0) -> None:
        self.here, self._most, self._starts_s, self._clock = here, most, starts_s, clock
        self.requests: list[list[dict[str, float]]] = []
        self._requested_s = 0.0

    def request(self, bundles: list[dict[str, float]]) -> None:
        self.requests.append(bundles)
        self._requested_s = self._clock.now_s

    def is_starting(self) -> bool:
        return self.here < min(self._most, self._wanted())

    def nodes(self) -> list[dict[str, Any]]:
        if self._clock.now_s > self._requested_s + self._starts_s:
            self.here = max(self.here, min(self._most, self._wanted()))
        gone = {"Alive": False, "Resources": {"GPU": 8.0}}
        small = [{"Alive": True, "Resources": has} for has in ({"CPU": 8.0}, {"GPU": 4.0})]
        return [gone, *small, *[{"Alive": True, "Resources": {"GPU": 8.0}}] * self.here]

    def _wanted(self) -> int:
        return len(self.requests[-1]) if self.requests else 0


def always(address: str, timeout_s: float) -> None:
    """Answer as a head does."""


def demand_of(
    ray: ScalingCluster, said: list[str], query: Callable[[str, float], None] = always
) -> NodeDemand:
    made = NodeDemand(ray, Head(lambda: "head:6379", query), {"GPU": 8.0}, 3, said.append)
    made._request = ray.request  # type: ignore[method-assign]
    made._is_starting = ray.is_starting  # type: ignore[method-assign]
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time of those who wait for nodes, which the test does not take."""
    made = Clock(0.0)
    monkeypatch.setattr(ray_head, "time", made)
    return made


def test_missing_nodes_are_demanded_waited_for_and_given_back(clock: Clock) -> None:
    # They take longer than an autoscaler that starts nothing is waited for.
    said: list[str] = []
    ray = ScalingCluster(clock, 0, 3, starts_s=500.0)
    demand = demand_of(ray, said)
    demand.meet()
    assert ray.here == 3
    assert ray.requests == [[{"GPU": 8.0}] * 3]  # not withdrawn: idle nodes would be stopped
    assert len(said) == 1
    assert said[0].startswith("the Ray cluster starts nodes: 0 of 3 are there; waiting up to")
    demand.withdraw()
    demand.withdraw()
    assert ray.requests[1:] == [[]]


def test_a_cluster_without_autoscaler_is_not_waited_for(clock: Clock) -> None:
    said: list[str] = []
    ray = ScalingCluster(clock, 2, 2)
    demand_of(ray, said).meet()
    assert clock.now_s < 30
    assert said == []
    assert ray.requests[-1] == []


def test_another_programs_demand_is_left_alone_if_all_nodes_are_there(clock: Clock) -> None:
    ray = ScalingCluster(clock, 3, 9)
    demand = demand_of(ray, [])
    demand.meet()
    demand.withdraw()
    assert ray.requests == []


def test_a_study_begins_with_fewer_nodes_if_the_others_do_not_come(clock: Clock) -> None:
    said: list[str] = []
    ray = ScalingCluster(clock, 1, 3, starts_s=1e6)
    demand_of(ray, said).meet()
    assert said[1].startswith("1 of 3 nodes are there after")
    assert ray.requests == [[{"GPU": 8.0}] * 3]  # late ones are taken while the study runs


def test_a_head_that_dies_meanwhile_ends_the_wait(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_head, "GONE_S", 10.0)  # before the autoscaler is given up

    def gone(address: str, timeout_s: float) -> None:
        raise ConnectionRefusedError

    ray = ScalingCluster(clock, 0, 3, starts_s=1e6)
    demand = demand_of(ray, [], gone)
    with pytest.raises(InputError, match="the head of the Ray cluster has not answered"):
        demand.meet()
    demand.withdraw()  # a call would wait for a minute
    assert len(ray.requests) == 1


def test_a_dry_run_has_no_node_started(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def seen(address: str, *, starts: bool, **_: Any) -> Survey:
        asked.append(starts)
        return Survey((), None)

    monkeypatch.setattr("tuner.cluster.joining.survey", seen)
    for begin in (dry_run, search_for):
        with pytest.raises(InputError, match="no node of the Ray cluster at 'auto' can be used"):
            begin(StudyRequest(ray_address="auto"))
    assert asked == [False, True]


# ---- Ray's autoscaler with its fake provider, whose nodes are processes of this machine

CONFIGURATION: dict[str, Any] = {
    "cluster_name": "fake",
    "max_workers": 4,
    "idle_timeout_minutes": 0.05,
    "upscaling_speed": 1.0,
    "provider": {
        "type": "fake_multinode",
        "gcs_address": "127.0.0.1:6379",
        "disable_node_updaters": True,
        "use_node_id_as_ip": True,
    },
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "gpus": {
            "resources": {"CPU": 1, "GPU": 2},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 2,
        },
    },
    "head_node_type": "ray.head.default",
    "file_mounts_sync_continuously": False,
    **{name: {} for name in ("docker", "auth", "file_mounts")},
    **{
        name: []
        for name in (
            *("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands"),
            *("setup_commands", "head_setup_commands", "worker_setup_commands"),
            *("head_start_ray_commands", "worker_start_ray_commands"),
        )
    },
}
#: Nodes that are demanded, kept, and stopped when they are no longer demanded; then too many.
DRIVER = """
import json, time
import ray
from tuner.cluster import head as ray_head
from tuner.cluster.head import NodeDemand
from tuner.cluster.joining import survey
from tuner.cluster.head import Head

ray.init(address="127.0.0.1:6379", log_to_driver=False)
def count():
    return sum(n["Alive"] and n["Resources"].get("GPU", 0) == 2 for n in ray.nodes())
said = []
ray_head._START_S = 90.0
head = Head(lambda: "127.0.0.1:6379")
demand = NodeDemand(ray, head, {"GPU": 2.0}, 2, said.append)
demand.meet()
counts = [count()]
time.sleep(7)
counts.append(count())
demand.withdraw()
until = time.monotonic() + 100
while count() and time.monotonic() < until:
    time.sleep(0.5)
counts.append(count())
ray_head._SIGN_S = 5.0
wide = NodeDemand(ray, head, {"GPU": 16.0}, 2, said.append)
begin = time.monotonic()
wide.meet()
wide_s = time.monotonic() - begin
ray.shutdown()
ray_head._SIGN_S = 20.0
found = [len(survey("127.0.0.1:6379", starts=starts).nodes) for starts in (False, True)]
print("ANSWER " + json.dumps([counts, said, wide_s, found]))
"""
SCRIPT = """
cd /
"$PYTHON" -m ray.scripts.scripts start --head --num-cpus 0 --node-ip-address 127.0.0.1 \\
    --port 6379 --temp-dir "$FOLDER" --autoscaling-config "$FOLDER/scaling.json" \\
    > "$FOLDER/start" || cat "$FOLDER/start"
"$PYTHON" "$FOLDER/driver.py"
"""


@pytest.mark.ray
@pytest.mark.slow
def test_rays_autoscaler_starts_keeps_and_stops_nodes() -> None:
    with short_folder() as folder:
        (folder / "scaling.json").write_text(json.dumps(CONFIGURATION))
        (folder / "driver.py").write_text(DRIVER)
        done = run_alone(
            SCRIPT,
            folder,
            timeout_s=280,
            RAY_AUTH_MODE="disabled",  # nobody else is in the namespace
            RAY_FAKE_CLUSTER="1",
            AUTOSCALER_UPDATE_INTERVAL_S="1",
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, (done.stdout + done.stderr)[-4000:]
    counts, said, wide_s, found = json.loads(lines[0].removeprefix("ANSWER "))
    # Idle nodes are stopped after three seconds here, and were kept as long as they were demanded.
    assert counts == [2, 2, 0]
    assert len(said) == 1
    assert "starts nodes: " in said[0]
    assert wide_s < 80  # not 90 s: no type of node has so many devices
    assert found == [1, 2]  # the head alone, and with the node that --cluster auto starts

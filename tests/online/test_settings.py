"""Power limits in place of clocks: a made-up GPU that only takes limits, and the twin node."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.online.test_agent import TORCHRUN, TRAIN, Devices, live_tuning, run, tuner_run
from tests.twin import TwinNode
from tests.twin.specimens import CORE_GPU
from tuner.online.agent import tune
from tuner.online.follow import PowerFollower
from tuner.online.live import LiveTuning
from tuner.online.request import TuningRequest
from tuner.online.settings import limit_settings, offers
from tuner.online.windows import Mark
from tuner.problem.constraints import Constraints
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InvalidValue
from tuner.workload.node.clocks.base import AppliedSettings, GovernorError
from tuner.workload.node.clocks.governor import NvmlGovernor
from tuner.workload.node.platforms import detect_cluster


class Limited(Devices):
    """Governor and meter of a GPU of 400 W that takes power limits and no clocks."""

    supported_clocks_MHz = ()
    limit_range_W = (100.0, 400.0)

    def __init__(self, idle_W: float, peak_W: float, bound: float) -> None:
        super().__init__()
        self.idle_W, self.peak_W, self.bound = idle_W, peak_W, bound
        self.limit_W, self.least_W = 400.0, 0.0

    def apply(self, live: Settings, *, ranks: int | None = None) -> AppliedSettings:
        limit_W = live.get("power_limit_W", 400)
        assert isinstance(limit_W, int)
        if self.least_W > limit_W:
            raise InvalidValue("power_limit_W", limit_W, f"from {self.least_W:g}")
        self.limit_W = limit_W
        self.log.append(limit_W)
        return AppliedSettings(live, live)

    def foreign(self) -> tuple[str, ...]:
        return ()

    def restore(self) -> None:
        self.limit_W = 400.0

    def step(self) -> float:
        share = (self.limit_W - self.idle_W) / (self.peak_W - self.idle_W)
        clock = min(1.0, max(0.02, share)) ** (1 / 2.4)
        seconds = 0.5 * (1 - self.bound + self.bound / clock)
        self.time_s += seconds
        self.energy_J += seconds * min(self.limit_W, self.peak_W)
        return self.time_s


def trained(
    gpu: Limited, slower: float | None = 0.05, **limits: float
) -> tuple[LiveTuning, list[str], list[float]]:
    target_W, steps = limits.get("power_cap_W"), 4000 if "budget_kJ" in limits else None
    request = TuningRequest(Constraints(max_slowdown=slower, **limits), steps)  # type: ignore[arg-type]
    (offer,) = offers(gpu, every=target_W is not None, measured_MHz=())  # type: ignore[arg-type]
    said, slowdowns = list[str](), list[float]()
    given = {"offer": offer, "signal": request.signal(), "started": gpu.read()}
    live = live_tuning(gpu, said, request, **given)
    for number in range(4000):
        live.take(Mark(0, number, gpu.step()))
        slowdowns.append(gpu.time_s / (0.5 * (number + 1)) - 1)
    return live, said, slowdowns


def in_order(gpu: Limited) -> bool:
    tried = [400, *gpu.log]  # each just below the lowest so far
    return all(limit >= 0.91 * min(tried[: i + 1]) for i, limit in enumerate(gpu.log))


@pytest.mark.parametrize(
    ("idle_W", "peak_W", "bound", "least"),
    [
        (60.0, 380.0, 0.3, 0.05),  # limits that bind
        (60.0, 260.0, 0.3, 0.05),  # a third of them do not bind
        # at the lowest a step would take 2.7 times as long, more than in proportion
        (180.0, 390.0, 1.0, 0.005),
    ],
)
def test_limits_save_energy_within_the_promise_at_any_step(
    idle_W: float, peak_W: float, bound: float, least: float
) -> None:
    gpu = Limited(idle_W, peak_W, bound)
    live, said, slowdowns = trained(gpu)
    assert max(slowdowns) <= 0.05
    assert said == []
    saved_J = 4000 * 0.5 * peak_W - gpu.energy_J
    assert saved_J > least * gpu.energy_J
    assert live.tuner.balance.saved_J[1] == pytest.approx(saved_J, rel=0.15)


@pytest.mark.parametrize(
    ("idle_W", "bound"),
    [
        (60.0, 0.2),
        (210.0, 1.0),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((60.0, 1.0), (180.0, 0.2), (180.0, 1.0), (210.0, 0.2))
        ),
    ],
)
def test_a_target_is_followed_by_limits_in_their_order_within_the_promise_at_any_step(
    idle_W: float, bound: float
) -> None:
    """Near the idle power a limit slows the steps out of all proportion."""
    gpu = Limited(idle_W, 390.0, bound)
    live, said, slowdowns = trained(gpu, power_cap_W=230.0)
    assert max(slowdowns) <= 0.05
    assert sum(live.seconds_at[1:]) > 100
    assert in_order(gpu)
    assert said == ["230 W is not followed until the budget of slowdown allows it again"]


@pytest.mark.parametrize(
    ("idle_W", "peak_W", "target_W"),
    [
        pytest.param(195.0, 390.0, 230.0, marks=pytest.mark.slow),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((60.0, 390.0, 280.0), (60.0, 260.0, 200.0), (190.0, 220.0, 205.0))
        ),
    ],
)
def test_a_target_is_met_by_a_limit_no_lower_than_needed_where_any_slowdown_is_allowed(
    idle_W: float, peak_W: float, target_W: float
) -> None:
    gpu = Limited(idle_W, peak_W, 1.0)
    live, said, _ = trained(gpu, None, power_cap_W=target_W)
    assert isinstance(live.tuner, PowerFollower)
    assert 0.96 * target_W <= gpu.limit_W <= target_W
    assert min(gpu.log) >= 0.92 * target_W
    assert live.tuner.periods[0].beyond_s <= 60
    assert said == []


def test_an_energy_budget_is_kept_by_limits_in_their_order() -> None:
    gpu = Limited(60.0, 390.0, 0.5)
    _, said, _ = trained(gpu, None, budget_kJ=0.85 * 780)
    assert gpu.energy_J <= 850 * 780
    assert in_order(gpu)
    assert said == []


def test_a_limit_that_the_device_refuses_is_one_sentence_and_it_goes_on() -> None:
    gpu = Limited(60.0, 380.0, 0.3)
    gpu.least_W = 350.0
    live, said, slowdowns = trained(gpu)
    assert len(said) == 1
    assert "from 350" in said[0]
    assert min(gpu.log) >= 350
    assert sum(live.seconds_at[1:]) > 1000
    assert max(slowdowns) <= 0.05


@pytest.mark.parametrize("high_W", [0.0, 28.7, 400.0])
def test_limits_are_below_that_of_the_machine_and_within_what_it_takes(high_W: float) -> None:
    watts = [float(str(each["power_limit_W"])) for each in limit_settings(0.8 * high_W, high_W)[1:]]
    assert watts == sorted(set(watts), reverse=True)
    assert all(0.8 * high_W <= each < high_W for each in watts)
    assert len(watts) == {0.0: 0, 28.7: 6, 400.0: 8}[high_W]


@pytest.mark.needs("cc")
def test_clocks_that_cannot_be_put_back_are_said_and_the_exit_code_is_the_trainings(
    twin_node: Callable[..., TwinNode], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    twin_node(replace(CORE_GPU, load=1.0))

    def fail(*_: object) -> None:
        raise GovernorError("the clock was not put back")

    def detected() -> Cluster:
        found = detect_cluster()
        monkeypatch.setattr(NvmlGovernor, "restore", fail)
        return found

    monkeypatch.setattr("tuner.online.agent.detect_cluster", detected)
    script = tmp_path / "train.py"
    script.write_text("")
    outcome = tune(["python", str(script)], TuningRequest())
    assert (outcome.exit_code, outcome.not_restored) == (0, "the clock was not put back")


@pytest.mark.needs("cc")
@pytest.mark.real
@pytest.mark.quiet
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_gpu_that_refuses_clocks_is_tuned_by_its_limit(
    twin_node: Callable[..., TwinNode],
) -> None:
    gpu = replace(CORE_GPU, clock_free_share=0.6, lockable=False, limit_W=340.0)
    node: Any = twin_node(gpu, gpu, virtual_time=False)
    launch = [str(TORCHRUN), "--nproc-per-node", "2", str(TRAIN), "1100", "0"]
    done = run(tuner_run("--max-slowdown", "8%", "--json", "--", *launch), node.environment())
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["ended"] == "", done.stderr
    assert outcome["kept"]
    assert done.stderr.count("takes no lock of its clock") == 1
    assert "power_limit_W is tried instead" in done.stderr
    assert sum(outcome["seconds_at"][1:]) > 5
    assert outcome["balance"]["saved_J"][1] > 0
    assert [node.limit_W(each) for each in range(2)] == [340.0, 340.0]

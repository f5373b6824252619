"""A training that follows a target of power: devices whose power follows their clock."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.online.events import event, fine
from benchmarks.online.tables import Problem, problems
from tests.online.test_agent import ROOT, TORCHRUN, TRAIN, Devices, gpus, live_tuning
from tuner.online.command import SHOWN, tuning_lines
from tuner.online.follow import Period, PowerFollower, Signal, watts_of
from tuner.online.request import TuningOutcome, TuningRequest
from tuner.online.settings import clock_settings
from tuner.online.windows import Chunk, Mark
from tuner.problem.constraints import Constraints
from tuner.search_spaces.errors import InputError

__all__ = ["gpus"]


class Fine(Devices):
    """Devices with a clock every 20 MHz."""

    supported_clocks_MHz = tuple(range(400, 1401, 20))
    limit_range_W = (0.0, 0.0)


class Job:
    """A training whose target the test writes."""

    def __init__(self, path: Path, budget: float | None = None) -> None:
        self.path, self.devices, self.said = path, Fine(), list[str]()
        self.target("none")
        self.signal = Signal(str(path))
        settings = clock_settings(self.devices, every=True)
        request = TuningRequest(Constraints(max_slowdown=budget, power_cap_W=1e4))
        self.live = live_tuning(
            *(self.devices, self.said, request), offer=(1400, settings), signal=self.signal
        )
        self.steps = 0

    def target(self, text: str) -> None:
        self.path.write_text(text)

    def train(self, steps: int) -> float:
        """Train; return the mean power, watts."""
        time_s, energy_J = self.devices.time_s, self.devices.energy_J
        for _ in range(steps):
            self.signal.read()
            self.live.take(Mark(0, self.steps, self.devices.step()))
            self.steps += 1
        return (self.devices.energy_J - energy_J) / (self.devices.time_s - time_s)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "watts")


def test_a_target_is_met_and_left_again(job: Job) -> None:
    assert job.train(200) == pytest.approx(380, rel=0.01)
    job.target("285 W\n")
    job.train(60)
    assert 0.93 * 285 < job.train(1000) <= 285
    job.target("none")
    job.train(10)
    assert job.train(200) == pytest.approx(380, rel=0.01)
    assert job.said == []
    assert isinstance(job.live.tuner, PowerFollower)
    assert [period.target_W for period in job.live.tuner.periods] == [None, 285.0, None]
    low, _, high = job.live.tuner.balance.lost_s
    assert low - 1 <= job.devices.time_s - job.steps * 0.5 <= high + 1


def test_a_job_that_draws_more_is_held_at_its_target_by_as_little_as_needed(job: Job) -> None:
    """Of a new epoch the window that told of it is known: else the lowest clock would be set."""
    job.train(200)
    job.target("285")
    job.train(400)
    plain, more = job.devices.step, 1.2
    lowest_MHz = job.devices.clock_MHz

    def hungrier() -> float:
        before_J = job.devices.energy_J
        time_s = plain()
        job.devices.energy_J += (more - 1) * (job.devices.energy_J - before_J)
        return time_s

    job.devices.step = hungrier  # type: ignore[method-assign]
    for _ in range(100):
        job.train(1)
        lowest_MHz = min(lowest_MHz, job.devices.clock_MHz)
    assert 0.9 * 285 < job.train(1000) <= 285
    assert lowest_MHz >= job.devices.clock_MHz - 100


@pytest.mark.parametrize(
    ("target", "said", "clock_MHz"),
    [("195", "is less than the job can draw", 400), ("700", "is more than the job draws", 1400)],
)
def test_a_target_out_of_reach_is_one_sentence(
    job: Job, target: str, said: str, clock_MHz: int
) -> None:
    job.devices.step = lambda: _flat(job.devices)  # type: ignore[method-assign]
    job.train(100)
    job.target(target)
    job.train(600)
    assert len([each for each in job.said if said in each]) == 1
    assert job.devices.clock_MHz == clock_MHz


def _flat(devices: Devices) -> float:
    """A step of devices that draw 200 W at least."""
    devices.time_s += 0.5
    devices.energy_J += 0.5 * (200 + 180 * (devices.clock_MHz / 1400) ** 2)
    return devices.time_s


def test_a_signal_that_stops_leaves_its_last_target_with_one_sentence(job: Job) -> None:
    job.train(100)
    job.target("300")
    job.train(100)
    job.path.unlink()
    assert job.train(300) <= 300
    job.target("")  # it is being written
    assert job.train(100) <= 300
    assert "stopped" in job.said[0]
    assert len(job.said) == 2


def test_a_jump_counts_when_it_is_read_twice(job: Job) -> None:
    job.target("300")
    job.signal.read()
    job.target("3")  # half of what is being written
    job.signal.read()
    assert job.signal.target_W == 300
    assert "jumped from 300 W to 3 W" in job.signal.problem
    job.target("310")
    job.signal.read()
    assert (job.signal.target_W, job.signal.problem) == (310, "")
    for _ in range(2):
        job.target("100")
        job.signal.read()
    assert job.signal.target_W == 100


def test_a_budget_of_slowdown_is_kept_at_any_time(tmp_path: Path) -> None:
    job = Job(tmp_path / "watts", budget=0.03)
    job.train(400)
    job.target("250")
    for _ in range(40):
        job.train(100)
        assert job.devices.time_s / (job.steps * 0.5) - 1 <= 0.03
    assert job.devices.time_s / (job.steps * 0.5) - 1 > 0.005
    assert any("budget of slowdown" in each for each in job.said)


@pytest.mark.parametrize("text", ["", "-3", "nan", "inf", "300 kW", "[300]"])
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="not a target"):
        watts_of(text)


def test_an_address_is_read_like_a_file() -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"240\n")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    signal = Signal(f"http://127.0.0.1:{server.server_port}/")
    assert signal.target_W == 240
    server.shutdown()
    server.server_close()
    signal.read()
    assert signal.target_W == 240
    assert "stopped" in signal.problem


def _changed(kind: str, time_s: float) -> float:
    """Factor of the power of a job of an adversary's: a jump, a drift, a swing."""
    jump = 1.3 if time_s > 1500 else 1.0
    swing = 1 + 0.1 * math.sin(2 * math.pi * time_s / 600)
    return {"jump": jump, "drift": 1 + 0.2 * time_s / 3600, "swing": swing}.get(kind, 1.0)


@pytest.mark.parametrize(
    ("kind", "step_s", "exponent", "noise"),
    [
        pytest.param("constant", 0.5, 2.4, 0.08, marks=pytest.mark.slow),
        pytest.param("jump", 0.5, 2.4, 0.01, marks=pytest.mark.long),
        pytest.param("swing", 0.5, 2.4, 0.01, marks=pytest.mark.slow),
        pytest.param("constant", 0.5, 0.3, 0.01, marks=pytest.mark.long),
        pytest.param("constant", 0.5, 5.0, 0.01, marks=pytest.mark.long),
        pytest.param("constant", 20.0, 2.4, 0.01, marks=pytest.mark.long),
        pytest.param("drift", 0.5, 2.4, 0.01, marks=pytest.mark.long),
    ],
)
def test_no_job_draws_more_than_its_target_for_long_or_much_less_without_need(
    kind: str, step_s: float, exponent: float, noise: float
) -> None:
    clocks = np.linspace(1400, 400, 51)
    follower = PowerFollower(
        [math.log(1400 / clock) for clock in clocks], max_slowdown=None, window_s=8.0, settle_s=2.0
    )
    random, now_s, setting = np.random.default_rng(0), 0.0, 0
    above_s = longest_s = spare_J = all_J = 0.0
    target_W = 350 if exponent < 1 else 285
    while now_s < 3600:
        follower.follow(target_W if now_s > 120 else None)
        time_s = step_s * (0.6 + 0.4 * 1400 / clocks[setting])
        powers_W = (80 + 300 * (clocks / 1400) ** exponent) * _changed(kind, now_s)
        steps = max(1, math.ceil(1 / time_s))
        seconds = steps * time_s * math.exp(random.normal(0, noise))
        energy_J = seconds * powers_W[setting] * math.exp(random.normal(0, noise))
        above = now_s > 120 and powers_W[setting] > 1.005 * target_W
        above_s = above_s + seconds if above else 0.0
        longest_s = max(longest_s, above_s)
        if now_s > 600:
            best_W = max((each for each in powers_W if each <= target_W), default=powers_W[-1])
            spare_J += (best_W - powers_W[setting]) * seconds
            all_J += best_W * seconds
        setting = follower.add(Chunk(steps, seconds, energy_J)).setting
        now_s += seconds
    assert longest_s <= max(40, 4 * step_s)
    assert spare_J <= 0.03 * all_J


def test_a_replayed_event_is_met_below_the_cap() -> None:
    law = fine(problems(None)[1])
    assert law is not None
    found = event(law, 3)
    assert found.met_s < 60
    assert found.overshoots == 0
    assert found.steps_error < 0.025  # a clock's step of 15 MHz is 2.6 % of the power


@pytest.mark.parametrize(
    "knee",
    [
        pytest.param(0.2, marks=pytest.mark.slow),
        *(pytest.param(knee, marks=pytest.mark.long) for knee in (0.1, 0.3)),
    ],
)
def test_power_that_falls_only_behind_a_knee_is_kept_below_the_cap(knee: float) -> None:
    """Between two measured clocks it lies far above their line."""
    x = tuple(0.0107 * at for at in range(60))
    power_W = tuple(400 * math.exp(-2.4 * max(0.0, each - knee)) for each in x)
    steps_s = tuple(0.5 * math.exp(0.4 * each) for each in x)
    found = event(Problem("knee", "tuned", x, steps_s, power_W), 5)
    assert found.met_s < 60
    assert found.overshoots <= 1


def test_what_was_asked_and_delivered_is_worded() -> None:
    from tuner.online.response import Balance

    periods = (Period(None, 10.0, 3800.0), Period(285.0, 100.0, 28000.0, 2.0))
    outcome = TuningOutcome(
        0, None, settings=("",), steps=9, balance=Balance(110.0, 31800.0), periods=periods
    )
    lines = tuning_lines(outcome)
    assert len([line for line in lines if line.startswith("Asked 285 W")]) == 1
    assert "280 W delivered" in " ".join(lines)
    assert "promise" not in " ".join(lines)
    many = tuning_lines(replace(outcome, periods=periods[1:] * 300))
    assert len([line for line in many if line.startswith("Asked")]) == SHOWN
    assert "And 288 more" in " ".join(many)


def figure(path: Path, name: str) -> float:
    """Return a figure of a file of metrics; nan until it is there."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name}{{"):
                return float(line.rpartition(" ")[2])
    return math.nan


@pytest.mark.needs("cc")
@pytest.mark.real
@pytest.mark.quiet
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_real_training_follows_a_target_and_leaves_it_again(gpus: Any, tmp_path: Path) -> None:
    target, metrics = tmp_path / "watts", tmp_path / "a.prom"
    target.write_text("none")
    environ = {**os.environ, **gpus.environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launch = [str(TORCHRUN), "--nproc-per-node", "2", str(TRAIN), "700", "0"]
    options = ["--follow-power", str(target), "--metrics-file", str(metrics), "--json"]
    words = [sys.executable, "-m", "tuner.cli.main", "run", *options, "--", *launch]
    job = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)

    def until(reached: Callable[[], bool]) -> None:
        end_s = time.monotonic() + 120
        while not reached():
            assert time.monotonic() < end_s
            assert job.poll() is None
            time.sleep(0.2)

    until(lambda: figure(metrics, "joulefront_steps_total") >= 100)
    top_W = figure(metrics, "joulefront_power_watts")
    asked_W = round(0.8 * top_W)
    target.write_text(f"{asked_W} W")
    until(lambda: figure(metrics, "joulefront_power_target_watts") == asked_W)
    # It comes from below, in windows of eight seconds: nothing tells yet how power falls.
    until(lambda: 0.85 * asked_W < figure(metrics, "joulefront_power_watts") <= asked_W)
    reached = figure(metrics, "joulefront_steps_total")
    until(lambda: figure(metrics, "joulefront_steps_total") >= reached + 100)
    assert 0.85 * asked_W < figure(metrics, "joulefront_power_watts") <= 1.02 * asked_W
    assert None not in [gpus.locked_MHz(each) for each in range(2)]
    target.write_text("none")
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0
    outcome = json.loads(output)
    assert (outcome["ended"], outcome["not_restored"]) == ("", "")
    free, kept, left = outcome["periods"]
    assert [free["target_W"], kept["target_W"], left["target_W"]] == [None, asked_W, None]
    assert kept["energy_J"] / kept["seconds"] <= asked_W
    assert kept["beyond_s"] < 0.25 * kept["seconds"]
    assert left["energy_J"] / left["seconds"] > asked_W
    assert [gpus.locked_MHz(each) for each in range(2)] == [None, None]
    assert not metrics.exists()

"""Launching the choice again: as often as it takes to be sure, and never in vain."""

from __future__ import annotations

import math
from itertools import takewhile
from types import SimpleNamespace

import numpy as np
import pytest

import tuner
from tests.support.studies import (
    LONG_JOB,
    METER,
    TalliedRunner,
    measured,
    run_optimize,
    run_replay,
    write_table,
)
from tuner.answer.parts import FurtherLaunches
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.search_spaces.configuration import Configuration
from tuner.study import session
from tuner.study.session import SPOILED
from tuner.workload.records.probe import Failure, ProbeRecord, ProbeRequest, Runner
from tuner.workload.records.trace import read_trace

pytestmark = pytest.mark.usefixtures("next_candidates")


class DrawnSamples(Runner):
    """A runner of few configurations whose launches differ at random; `truth` is seconds a step.

    Args:
        truth: step time by micro-batch.
        lucky: step times that the search sees instead, once, by micro-batch.
    """

    def __init__(self, truth: dict[int, float], lucky: dict[int, float] | None = None) -> None:
        self.meter, self._truth, self._lucky = METER, truth, dict(lucky or {})
        self._rng = np.random.default_rng(3)

    def run(self, request: ProbeRequest) -> ProbeRecord:
        size = int(str(request.launch.get("micro_batch", 1)))
        seconds = self._truth.get(size, 2.0) * math.exp(self._rng.normal(0, 0.004))
        if request.purpose != "verify" and size in self._lucky:
            seconds = self._lucky.pop(size)
        windows = tuple(measured(live, time_s=seconds) for live in request.live)
        return ProbeRecord(request, windows, METER, launch_s=3.0, wall_s=8.0, energy_J=200.0)

    def close(self) -> None:
        pass


def study(runner, tmp_path, **more):
    options = {
        "runs_dir": tmp_path / "runs",
        "name": "study",
        "report": False,
        "cluster": "cpu-2",
        "baseline": Configuration.of(data_parallel=2, micro_batch=1),
    }
    return run_optimize(executor=SimulatedExecutor(runner), **{**options, **more})


def purposes(result) -> list[str]:
    return [
        record.request.purpose
        for record in read_trace(result.run_dir / "trace" / "probes.jsonl").records
    ]


def test_a_large_saving_takes_few_launches(tmp_path) -> None:
    result = study(TalliedRunner(DrawnSamples({1: 1.0, 2: 0.4, 4: 0.4})), tmp_path, max_probes=16)
    made = purposes(result)
    assert len(made) <= 16
    assert made.count("verify") <= 4
    assert result.recommendation.action == "train"
    assert result.recommended.configuration.get("micro_batch") in (2, 4)
    assert result.verification.probes == made.count("verify")
    # The same from the folder alone.
    again = tuner.load_result(result.run_dir)
    assert again.verification == result.verification
    assert again.headline == result.headline


@pytest.mark.searches
def test_few_probes_end_in_an_answer(tmp_path) -> None:
    """Every candidate saves 60 % or more, and the limit leaves room for few launches."""
    truth = {1: 1.0, 2: 0.4, 4: 0.4, 8: 0.4}
    result = study(DrawnSamples(truth), tmp_path, max_probes=5)
    assert result.spent.probes <= 5
    assert result.recommendation.action == "train"


def test_probes_kept_for_verification_search_where_nothing_is_to_verify(tmp_path) -> None:
    class TodayIsBest(DrawnSamples):
        def run(self, request: ProbeRequest) -> ProbeRecord:
            self.first = getattr(self, "first", request.launch)  # the baseline
            self._truth = {1: 0.4 if request.launch == self.first else 0.8}
            return super().run(request)

    result = study(TalliedRunner(TodayIsBest({})), tmp_path, job=LONG_JOB, max_probes=6)
    assert purposes(result).count("search") == 5
    assert result.stop.figures["reserved"] == 0
    assert result.recommendation.action == "keep"


def test_a_probe_that_fits_the_budget_and_not_beside_the_reserve_is_not_started(tmp_path) -> None:
    """Of 1.9 kJ a quarter is kept; probes take 0.2 kJ each, one of them from what is kept."""
    runner = TalliedRunner(DrawnSamples({1: 1.0, 2: 0.5, 4: 0.9, 8: 0.9, 16: 0.9}))
    result = study(runner, tmp_path, job=LONG_JOB, probe_budget_kJ=1.9)
    figures = result.stop.figures
    assert figures["reserved_kJ"] > 0
    free_kJ = figures["left_kJ"] - figures["reserved_kJ"]
    assert 0 < free_kJ < figures["needed_kJ"] <= figures["left_kJ"]
    made = purposes(result)
    last = len(made) - made[::-1].index("search")
    assert "verify" in made[:last]  # today again, which two probes' joules allow
    assert "verify" in made[last:]


def test_a_lucky_window_is_found_out(tmp_path) -> None:
    runner = TalliedRunner(DrawnSamples({1: 1.0, 2: 0.85, 4: 1.0}, lucky={4: 0.5}))
    result = study(runner, tmp_path, max_probes=30)
    advised = result.recommended
    assert advised.time_to_solution_s / result.steps > 0.8  # and never the half that was seen


def test_more_launches_than_were_announced_are_announced_again(monkeypatch) -> None:
    """ "About 5 launches" were 16 on a busy machine, and nothing was said from the sixth on."""
    choice = SimpleNamespace(configuration=Configuration.of(micro_batch=2))
    today = SimpleNamespace(configuration=Configuration.of(micro_batch=1))
    left = iter([2, 1, 3, 2, 1, None])
    told: list[str] = []
    search = SimpleNamespace(
        state=SimpleNamespace(judge=SimpleNamespace(today_point=today)),
        cost=SimpleNamespace(expected_kJ=1.0),
        limit_on=lambda configuration: None,
        note=told.append,
        verify=lambda *_: told.append("launch") or SimpleNamespace(failure=None),
    )

    def launches(*_: object) -> tuple[object, FurtherLaunches | None]:
        count = next(left)
        return choice, None if count is None else FurtherLaunches(count, of_baseline=False)

    monkeypatch.setattr(session, "launches_to_verify", launches)
    assert session._verify(search) is None
    first, *rest = told
    assert first.endswith("until the choice is sure: about 2 launches")
    again = "the choice is not sure yet: about 3 more"
    assert rest == ["launch", "launch", again, "launch", "launch", "launch"]


def test_verifying_goes_on_where_it_was_interrupted(tmp_path) -> None:
    seen = []

    def stop(event) -> None:
        if event.kind == "started" and event.request.purpose == "verify":
            seen.append(event.request)
            if len(seen) == 2:
                raise KeyboardInterrupt

    truth = {1: 1.0, 2: 0.7, 4: 0.9}
    with pytest.raises(KeyboardInterrupt):
        study(TalliedRunner(DrawnSamples(truth)), tmp_path, max_probes=16, on_progress=stop)
    stopped = tuner.load_result(tmp_path / "runs" / "study")
    assert stopped.recommendation is not None  # an interrupt throws no evidence away
    result = study(TalliedRunner(DrawnSamples(truth)), tmp_path, max_probes=16)
    assert result.recommendation.action == "train"


class Fails(DrawnSamples):
    """A machine on which the baseline runs out of memory from its second launch on."""

    def run(self, request):
        if request.launch.get("micro_batch") == 1 and request.purpose == "verify":
            failure = Failure("out_of_memory", "no memory left")
            return ProbeRecord(request, (), METER, failure, wall_s=8.0, energy_J=100.0)
        return super().run(request)


def test_a_baseline_that_cannot_start_again_does_not_keep_itself(tmp_path) -> None:
    result = study(TalliedRunner(Fails({1: 1.0, 2: 0.3, 4: 0.3})), tmp_path, max_probes=16)
    assert result.recommendation.action == "train"
    assert result.recommended.configuration.get("micro_batch") in (2, 4)


def test_no_verify_makes_no_probe_and_is_visible(tmp_path) -> None:
    result = study(DrawnSamples({1: 1.0, 2: 0.7}), tmp_path, max_probes=6, verify=False)
    assert "verify" not in purposes(result)
    assert result.verification.ended.kind == "not_requested"
    assert tuner.load_result(result.run_dir).verification == result.verification


def test_without_verification_a_share_of_the_training_ends_the_search(tmp_path) -> None:
    result = study(DrawnSamples({}), tmp_path, max_probes=40, verify=False, search_share=1e-6)
    assert result.stop.kind == "search_share"


def test_a_table_that_tells_no_spread_is_not_verified(tmp_path) -> None:
    result = run_replay(
        write_table(tmp_path / "t"), runs_dir=tmp_path / "runs", report=False, max_probes=20
    )
    assert result.verification.ended.kind == "no_spread"
    for point in result.points:  # nothing says that the table's figures are luck
        window = result.windows[point.configuration][0]
        recorded_s = window.step_time_s * result.steps
        assert point.time_to_solution_s == pytest.approx(recorded_s, rel=0.006)
        assert point.power_W == pytest.approx(window.power_W, rel=0.006)


@pytest.mark.searches
def test_a_table_with_noise_is_drawn_again(tmp_path) -> None:
    from tests.support.studies import TOML

    toml = TOML + "[noise]\ntime_cv = 0.005\npower_cv = 0.01\n"
    folder = write_table(tmp_path / "t", toml=toml)
    result = run_replay(folder, runs_dir=tmp_path / "runs", report=False, max_probes=20)
    assert "verify" in purposes(result)
    assert result.verification.ended is None


def test_a_trace_is_not_measured_again(tmp_path) -> None:
    first = study(DrawnSamples({1: 1.0, 2: 0.7}), tmp_path, max_probes=6)
    result = run_replay(first.run_dir, runs_dir=tmp_path / "again", report=False)
    assert result.verification.ended.kind == "recorded_trace"


class NothingVerified(DrawnSamples):
    """Launches that verify end in a failure; those of the search are drawn."""

    def __init__(self, failure: Failure) -> None:
        super().__init__({1: 1.0, 2: 0.7, 4: 0.9})
        self._failure = failure

    def run(self, request: ProbeRequest) -> ProbeRecord:
        if request.purpose == "verify":
            return ProbeRecord(request, (), METER, self._failure, wall_s=8.0, energy_J=100.0)
        return super().run(request)


def test_verification_ends_after_launches_that_say_nothing_of_the_configuration(tmp_path) -> None:
    failure = Failure("node", "another job came")
    result = study(NothingVerified(failure), tmp_path, max_probes=40)
    assert result.verification.ended.kind == "spoiled"
    last = [*takewhile(lambda purpose: purpose == "verify", reversed(purposes(result)))]
    assert len(last) == SPOILED + 1


def test_verification_ends_where_the_training_is_over_too_soon(tmp_path) -> None:
    """What was measured before holds: nothing of the configuration failed."""
    failure = Failure("ended", "the program ended by itself after 90 optimizer steps")
    result = study(NothingVerified(failure), tmp_path, max_probes=40)
    assert result.verification.ended.kind == "too_short"
    assert result.spent.failed == 0
    assert result.judged.failed == frozenset()

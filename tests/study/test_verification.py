"""Verifying the choice: what survives, what does not, what is tried next, and what it may cost."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

import tuner
from tuner.executors.local import SimulatedExecutor
from tuner.problem.constraints import Constraints
from tuner.results.parts import Point
from tuner.results.verification import (
    ab_pairs,
    attempts_of,
    choose_verified,
    next_is_baseline,
)
from tuner.search_spaces.configuration import Configuration
from tuner.testing.studies import (
    METER,
    TalliedRunner,
    measured,
    run_optimize,
    run_replay,
    write_table,
)
from tuner.workload.probe import Failure, ProbeRecord, ProbeRequest
from tuner.workload.trace import read_trace

A = Configuration.of(data_parallel=2, micro_batch=1)
B = Configuration.of(data_parallel=2, micro_batch=2)
C = Configuration.of(data_parallel=2, micro_batch=4)


def launch(
    number: int,
    configuration: Configuration,
    time_s: float,
    power_W: float = 20.0,
    purpose: str = "verify",
    failure: Failure | None = None,
) -> ProbeRecord:
    windows = () if failure else (measured(time_s=time_s, power_W=power_W),)
    asked = ProbeRequest(f"p{number:04d}", configuration.launch, purpose=purpose)
    return ProbeRecord(asked, windows, METER, failure, wall_s=9.0, energy_J=100.0)


def searched(*figures: tuple[Configuration, float]) -> list[ProbeRecord]:
    """The search's own records: the baseline first."""
    return [
        launch(i, configuration, time_s, purpose="baseline" if i == 0 else "search")
        for i, (configuration, time_s) in enumerate(figures)
    ]


def in_turn(first: int, tried: Configuration, a: list[float], b: list[float]) -> list[ProbeRecord]:
    """A B B A A B with these step times."""
    a, b = list(a), list(b)
    records: list[ProbeRecord] = []
    while a or b:
        of_baseline = next_is_baseline(records, A)
        time_s = (a if of_baseline else b).pop(0)
        records.append(launch(first + len(records), A if of_baseline else tried, time_s))
    return records


def points_of(*figures: tuple[Configuration, float, float]) -> tuple[Point, ...]:
    return tuple(
        Point(
            configuration=configuration,
            energy_to_solution_kJ=time_s * power_W / 1000,
            time_to_solution_s=time_s,
            energy_interval_kJ=(time_s * power_W / 1010, time_s * power_W / 990),
            time_interval_s=(0.99 * time_s, 1.01 * time_s),
            power_W=power_W,
            source="measured",
            windows=1,
            p_nondominated=math.nan,
            meter=METER,
        )
        for configuration, time_s, power_W in figures
    )


def test_launches_come_in_turn() -> None:
    records = in_turn(0, B, [1.0] * 3, [0.9] * 3)
    assert [r.request.configurations()[0] for r in records] == [A, B, B, A, A, B]


def test_a_baselines_launch_belongs_to_the_pair_it_was_made_for() -> None:
    records = [*in_turn(0, B, [1.0] * 3, [0.9] * 3), *in_turn(6, C, [1.0] * 2, [0.8] * 2)]
    groups, waiting = ab_pairs(records, A)
    assert [len(groups[each]) for each in (B, C)] == [6, 4]
    assert not waiting
    groups, waiting = ab_pairs(records[:7], A)
    assert list(groups) == [B]
    assert [record.request.probe_id for record in waiting] == ["p0006"]


def test_what_is_shown_to_be_better_survives() -> None:
    records = [*searched((A, 1.0), (B, 0.8)), *in_turn(2, B, [1.0, 1.01, 0.99], [0.8, 0.81, 0.79])]
    (attempt,) = attempts_of(records, A)
    assert attempt.survived
    assert attempt.pairs == 3
    assert attempt.step_time.relative == pytest.approx(-0.2, abs=0.001)
    assert attempt.step_time.low < -0.2 < attempt.step_time.high < 0
    assert attempt.step_time.p_value < 0.001
    assert "20.00 % less" in attempt.sentence


def test_the_searchs_own_lucky_window_is_not_part_of_the_proof() -> None:
    records = [*searched((A, 1.0), (B, 0.5)), *in_turn(2, B, [1.0, 1.05, 0.95], [1.02, 0.97, 1.0])]
    (attempt,) = attempts_of(records, A)
    assert not attempt.survived
    assert abs(attempt.step_time.relative) < 0.02
    assert "not shown" in attempt.sentence or "neither was shown" in attempt.sentence


def test_a_launch_that_fails_again_does_not_survive() -> None:
    failure = Failure("out_of_memory", "a rank ran out of memory")
    records = [*searched((A, 1.0), (B, 0.8)), launch(2, A, 1.0), launch(3, B, 0.0, failure=failure)]
    (attempt,) = attempts_of(records, A)
    assert not attempt.survived
    assert "out of memory" in attempt.sentence


def test_a_node_that_fails_is_not_the_configurations_fault() -> None:
    spoiled = launch(3, B, 0.0, failure=Failure("node", "the meter broke"))
    records = [*searched((A, 1.0), (B, 0.8)), launch(2, A, 1.0), spoiled]
    assert attempts_of(records, A) == ()


def test_what_fell_is_passed_over_and_the_next_is_tried() -> None:
    points = points_of((A, 1.0, 20.0), (B, 0.8, 20.0), (C, 0.9, 20.0))
    records = searched((A, 1.0), (B, 0.8), (C, 0.9))
    verified = choose_verified(points, records, Constraints())
    assert verified.to_try == B
    records += in_turn(3, B, [1.0, 1.02, 0.98], [1.0, 0.98, 1.02])
    verified = choose_verified(points, records, Constraints())
    assert verified.to_try == C
    assert verified.verification.status == "unfinished"
    assert "did not survive" in verified.choice.sentence
    records += in_turn(9, C, [1.0, 1.01, 0.99], [0.9, 0.91, 0.89])
    verified = choose_verified(points, records, Constraints())
    assert verified.to_try is None
    assert verified.best.configuration == C
    assert verified.verification.status == "confirmed"
    assert [attempt.survived for attempt in verified.verification.attempts] == [False, True]
    assert verified.verification.probes == 12


def test_what_is_not_clear_yet_is_measured_further_and_not_chosen_meanwhile() -> None:
    """1 % less time after two pairs is neither shown nor given up."""
    points = points_of((A, 1.0, 20.0), (B, 0.95, 20.0), (C, 0.97, 20.0))
    records = searched((A, 1.0), (B, 0.95), (C, 0.97)) + in_turn(3, B, [1.0, 1.02], [0.99, 1.0])
    (attempt,) = attempts_of(records, A)
    assert attempt.undecided
    assert not attempt.survived
    assert "is undecided" in attempt.sentence
    verified = choose_verified(points, records, Constraints(), unfinished="no room is left")
    assert verified.to_try == B
    assert verified.verification.status == "unfinished"
    # Once another candidate is tried, it is no longer open; that one is not chosen unverified.
    records += in_turn(7, C, [1.0, 1.02], [0.99, 1.0])
    first, second = attempts_of(records, A)
    assert not first.undecided
    assert second.undecided
    verified = choose_verified(points, records, Constraints(), unfinished="no room is left")
    assert verified.to_try == C
    assert verified.best.configuration == A
    assert "no room is left" in verified.verification.sentence


def test_later_attempts_have_less_to_spend_and_a_fourth_nothing() -> None:
    a, b = [1.0, 1.01, 0.99, 1.0], [0.97, 0.98, 0.96, 0.97]
    records = searched((A, 1.0), (B, 0.9))
    p_values = []
    for number in range(4):
        tried = Configuration.of(data_parallel=2, micro_batch=2 ** (number + 1))
        records += in_turn(2 + 8 * number, tried, a, b)
        records[1:1] = [launch(100 + number, tried, 0.9, purpose="search")]
    for attempt in attempts_of(records, A):
        p_values.append(attempt.step_time.p_value)
    assert p_values[1] == pytest.approx(2 * p_values[0])
    assert p_values[2] == pytest.approx(6 * p_values[0])
    assert p_values[3] == 1.0


def test_where_nothing_survives_the_baseline_is_kept() -> None:
    points = points_of((A, 1.0, 20.0), (B, 0.8, 20.0))
    records = searched((A, 1.0), (B, 0.8)) + in_turn(2, B, [1.0, 1.02, 0.98], [1.0, 0.98, 1.02])
    verified = choose_verified(points, records, Constraints())
    assert verified.best.configuration == A
    assert verified.verification.status == "refuted"
    assert verified.choice.sentence.startswith("Keep what you run today")


def test_a_choice_that_promised_nothing_but_a_limit_stands() -> None:
    """Under a power cap the best that fits may be slower and use more energy than the baseline."""
    points = points_of((A, 1.0, 30.0), (B, 2.0, 18.0))
    records = searched((A, 1.0), (B, 2.0)) + in_turn(2, B, [1.0, 1.01], [2.0, 2.02])
    verified = choose_verified(points, records, Constraints(power_cap_W=20.0))
    assert verified.best.configuration == B
    assert verified.verification.status == "confirmed"


def test_where_the_baseline_cannot_be_kept_being_no_worse_is_enough() -> None:
    """A job that may use one GPU is not told to keep what runs on two."""
    one = Configuration.of(data_parallel=1, micro_batch=2)
    slow = Configuration.of(data_parallel=1, micro_batch=1)
    points = points_of((A, 1.0, 30.0), (one, 2.0, 14.0), (slow, 3.0, 20.0))
    records = searched((A, 1.0), (one, 0.99), (slow, 3.0))
    records += in_turn(3, one, [1.0, 1.02, 0.98], [1.01, 0.98, 1.01])
    verified = choose_verified(points, records, Constraints(max_gpus=1))
    assert verified.best.configuration == one
    assert verified.verification.status == "confirmed"
    assert "does not meet the constraints" in verified.verification.attempts[0].reason
    # Where it can be kept, nothing shown is nothing gained.
    assert not attempts_of(records, A)[0].survived
    # What is shown to be worse falls all the same.
    records = searched((A, 1.0), (one, 0.9)) + in_turn(2, one, [1.0, 1.01], [1.3, 1.31])
    assert not attempts_of(records, A, feasible=False)[0].survived


def test_without_a_limit_that_needs_it_a_candidate_without_any_saving_falls() -> None:
    """Windows of the verification itself may make the baseline look worse than a neighbour."""
    points = points_of((A, 1.1, 20.0), (B, 1.0, 20.0))
    records = searched((A, 0.9), (B, 1.0)) + in_turn(2, B, [1.0, 1.01], [1.0, 1.02])
    verified = choose_verified(points, records, Constraints())
    assert verified.verification.status == "refuted"
    assert verified.best.configuration == A
    assert "the search found no saving in it;" in verified.verification.attempts[0].sentence


def test_what_misses_the_deadline_when_launched_again_gives_way_to_the_next() -> None:
    points = points_of((A, 1.2, 10.0), (B, 0.99, 14.0), (C, 0.9, 17.0))
    limits = Constraints(deadline_s=1.0)
    records = searched((A, 1.2), (B, 0.99), (C, 0.9))
    assert choose_verified(points, records, limits).to_try == B
    records += in_turn(3, B, [1.2, 1.19, 1.21], [1.02, 1.01, 1.03])
    verified = choose_verified(points, records, limits)
    assert verified.to_try == C
    assert "it meets the limits with a probability of" in verified.verification.attempts[0].reason
    records += in_turn(9, C, [1.2, 1.19, 1.21], [0.9, 0.91, 0.89])
    verified = choose_verified(points, records, limits)
    assert (verified.best.configuration, verified.verification.status) == (C, "confirmed")
    assert verified.choice.p_all_met > 0.99


def test_fresh_launches_tell_the_probability_of_a_limit() -> None:
    """The point says 0.99 s for certain; four launches of it say that it may be either."""
    points = points_of((A, 1.2, 10.0), (B, 0.99, 14.0))
    records = searched((A, 1.2), (B, 0.99))
    records += in_turn(2, B, [1.2, 1.15, 1.25, 1.2], [0.97, 1.02, 0.98, 1.02])
    verified = choose_verified(points, records, Constraints(deadline_s=1.0))
    assert verified.verification.status == "confirmed"
    assert 0.5 < verified.choice.p_all_met < 0.7


def test_the_baseline_itself_needs_no_proof() -> None:
    verified = choose_verified(points_of((A, 1.0, 20.0)), searched((A, 1.0)), Constraints())
    assert verified.verification.status == "baseline"
    assert verified.to_try is None


def test_without_a_baseline_and_when_off_it_says_so() -> None:
    points, records = points_of((B, 0.8, 20.0)), searched((B, 0.8))
    records = [launch(0, B, 0.8, purpose="search")]
    assert choose_verified(points, records, Constraints()).verification.status == "unfinished"
    verified = choose_verified(
        points, records, Constraints(), off="verification was switched off (--no-verify)"
    )
    assert verified.verification.status == "off"
    assert "--no-verify" in verified.verification.sentence


# ---- as a phase of a study


class Drawn:
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
            seconds = self._lucky[size]
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


def test_a_study_verifies_its_choice_within_its_limits(tmp_path) -> None:
    runner = TalliedRunner(Drawn({1: 1.0, 2: 0.7, 4: 0.9}))
    result = study(runner, tmp_path, max_probes=16)
    made = purposes(result)
    assert len(made) <= 16
    assert 4 <= made.count("verify") <= 6
    assert made[-1] == "verify"  # the phase comes last
    assert result.verification.status == "confirmed"
    assert result.verification.attempts[-1].configuration == result.best.configuration
    assert result.verification.probes == made.count("verify")
    # When probing is repaid follows from the fresh launches alone.
    saving = -result.verification.attempts[-1].energy.relative
    saved_kJ = saving * result.baseline.energy_to_solution_kJ
    expected = result.spent.energy_kJ / saved_kJ
    assert result.spent.payback_share == pytest.approx(expected)
    # The same from the folder alone.
    again = tuner.load_result(result.run_dir)
    assert again.verification == result.verification
    assert again.best.configuration == result.best.configuration


def test_a_lucky_window_does_not_survive_and_the_next_is_tried(tmp_path) -> None:
    runner = TalliedRunner(Drawn({1: 1.0, 2: 0.85, 4: 1.0}, lucky={4: 0.5}))
    result = study(runner, tmp_path, max_probes=30)
    fallen = [a.configuration for a in result.verification.attempts if not a.survived]
    assert fallen
    assert all(configuration.get("micro_batch") == 4 for configuration in fallen)
    assert result.best.configuration not in fallen


def test_verifying_goes_on_where_it_was_interrupted(tmp_path) -> None:
    runner = TalliedRunner(Drawn({1: 1.0, 2: 0.7, 4: 0.9}))
    seen = []

    def stop(event) -> None:
        if event.kind == "started" and event.request.purpose == "verify":
            seen.append(event.request)
            if len(seen) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(runner, tmp_path, max_probes=16, on_progress=stop)
    result = study(TalliedRunner(Drawn({1: 1.0, 2: 0.7, 4: 0.9})), tmp_path, max_probes=16)
    assert result.verification.status == "confirmed"
    counted = [name for name in purposes(result) if name == "verify"]
    assert 4 <= len(counted) <= 6


def test_no_verify_makes_no_probe_and_is_visible(tmp_path) -> None:
    result = study(Drawn({1: 1.0, 2: 0.7}), tmp_path, max_probes=16, verify=False)
    assert "verify" not in purposes(result)
    assert result.verification.status == "off"
    assert "--no-verify" in result.verification.sentence
    assert tuner.load_result(result.run_dir).verification == result.verification


def test_too_little_room_is_said_and_what_would_be_enough(tmp_path) -> None:
    """What the sentence tells to do is enough to have the choice verified."""
    # The space's own settings are slower, so that a choice other than the baseline is found.
    truth = {1: 1.0, 2: 0.7, 4: 0.6, 8: 0.65}
    result = study(Drawn(truth), tmp_path, max_probes=9)
    assert "verify" not in purposes(result)
    assert result.verification.status == "unfinished"
    assert "fewer than 12 probes" in result.verification.sentence
    (most,) = re.findall(r"--name study and --max-probes (\d+)", result.verification.sentence)
    assert int(most) >= result.spent.probes + 4
    result = study(Drawn(truth), tmp_path, max_probes=int(most))
    assert purposes(result).count("verify") >= 4
    assert result.verification.status == "confirmed"


def test_a_table_that_tells_no_spread_is_not_verified(tmp_path) -> None:
    result = run_replay(
        write_table(tmp_path / "t"), runs_dir=tmp_path / "runs", report=False, max_probes=20
    )
    assert result.verification.status == "off"
    assert "no spread" in result.verification.sentence


def test_a_table_with_noise_is_drawn_again(tmp_path) -> None:
    from tuner.testing.studies import TOML

    toml = TOML + "[noise]\ntime_cv = 0.005\npower_cv = 0.01\n"
    folder = write_table(tmp_path / "t", toml=toml)
    result = run_replay(folder, runs_dir=tmp_path / "runs", report=False, max_probes=20)
    assert result.verification.status in ("confirmed", "baseline")
    assert purposes(result).count("verify") >= 4


def test_a_trace_is_not_measured_again(tmp_path) -> None:
    first = study(Drawn({1: 1.0, 2: 0.7}), tmp_path, max_probes=14)
    result = run_replay(first.run_dir, runs_dir=tmp_path / "again", report=False)
    assert result.verification.status == "off"
    assert "recorded trace" in result.verification.sentence

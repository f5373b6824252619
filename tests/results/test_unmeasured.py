"""The chance that an unmeasured candidate meets limits that no measured one meets."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from tuner.problem.constraints import Constraints
from tuner.results.choice import likeliest, never_measured
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.testing.studies import run_replay, write_table
from tuner.workload.probe import Failure, Measurement, MeterInfo, ProbeRecord, ProbeRequest

SLOW, FAST = Configuration.of(micro_batch=1), Configuration.of(micro_batch=2, data_parallel=4)
STEPS = 100


def surrogates(std: float = 0.1, correlation: float = 0.0) -> SimpleNamespace:
    """SLOW takes 2 s a step at 100 W, FAST 1 s at 150 W; both logarithms err by `std`."""
    time, power = {SLOW: 2.0, FAST: 1.0}, {SLOW: 100.0, FAST: 150.0}

    def with_intervals(configurations: list[Configuration]) -> SimpleNamespace:
        log_time, log_power = (
            np.log([figure[c] for c in configurations]) for figure in (time, power)
        )
        errors = np.full(len(configurations), std)
        return SimpleNamespace(
            log_time=log_time,
            log_time_std=errors,
            log_power=log_power,
            log_power_std=errors,
            log_energy=log_time + log_power,
            log_energy_std=errors * math.sqrt(2 * (1 + correlation)),
            correlation=correlation,
        )

    return SimpleNamespace(with_intervals=with_intervals)


def chance(model: SimpleNamespace | None = None, **limits: float) -> tuple[Configuration, float]:
    found = likeliest(model or surrogates(), [SLOW, FAST], Constraints(**limits), STEPS)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_each_limit_has_the_probability_of_its_own_quantity() -> None:
    normal = stats.norm.cdf
    configuration, share = chance(deadline_s=95.0)
    assert configuration == FAST
    assert share == pytest.approx(normal(math.log(0.95) / 0.1), abs=0.03)
    configuration, share = chance(power_cap_W=105.0)
    assert configuration == SLOW
    assert share == pytest.approx(normal(math.log(1.05) / 0.1), abs=0.03)
    configuration, share = chance(budget_kJ=16.0)  # 15 kJ of FAST, 20 kJ of SLOW
    assert configuration == FAST
    assert share == pytest.approx(normal(math.log(16 / 15) / 0.1 / math.sqrt(2)), abs=0.03)


def test_limits_are_met_together_and_errors_go_together() -> None:
    limits = {"deadline_s": 100.0, "power_cap_W": 150.0}
    assert chance(**limits)[1] == pytest.approx(0.25, abs=0.03)
    assert chance(surrogates(correlation=0.99), **limits)[1] == pytest.approx(0.5, abs=0.06)
    assert chance(surrogates(correlation=-0.99), **limits)[1] < 0.06
    assert chance(deadline_s=95.0, max_gpus=1)[0] == SLOW
    assert chance(deadline_s=95.0, max_gpus=1)[1] == 0.0


def test_without_candidates_or_with_an_unknown_quantity_nothing_is_said() -> None:
    model = surrogates()
    assert likeliest(model, [], Constraints(deadline_s=95.0), STEPS) is None  # type: ignore[arg-type]
    asked = Constraints(peak_power_W=95.0)
    assert likeliest(model, [SLOW], asked, STEPS) is None  # type: ignore[arg-type]


def test_a_measured_setting_and_a_failed_launch_are_left_out() -> None:
    meter = MeterInfo("nvml", "gpu", "a counter")
    setting = Settings({"clock_MHz": 900})
    of_slow = Configuration(SLOW.launch, setting)
    window = Measurement(setting, 3, 5.0, 1.6, 1500.0, 300.0)
    failure = Failure("out_of_memory", "no room")
    records = [
        ProbeRecord(ProbeRequest("p0", SLOW.launch, (setting,)), (window,), meter),
        ProbeRecord(ProbeRequest("p1", FAST.launch), (), meter, failure=failure),
    ]
    assert never_measured([SLOW, of_slow, FAST], records) == (SLOW,)


def test_a_cap_that_nothing_measured_meets_names_the_likeliest_candidate(tmp_path) -> None:
    result = run_replay(
        write_table(tmp_path / "t"), runs_dir=tmp_path / "runs", report=False, max_probes=4
    )
    assert result.unmeasured
    assert not {p.configuration for p in result.points} & set(result.unmeasured)
    least = min(point.power_W for point in result.points)
    sentence = result.choose(power_cap_W=0.995 * least).choice.sentence
    assert sentence.startswith("Nothing measured meets the power cap: the least found is ")
    assert "unmeasured candidate" in sentence
    hopeless = result.choose(power_cap_W=0.01 * least).choice.sentence
    assert hopeless.endswith(
        "No unmeasured candidate meets this with a probability of 1 % or more."
    )
    met = result.choose(power_cap_W=1.1 * least).choice
    assert met.met
    assert "unmeasured" not in met.sentence

"""Power limits that cannot bind are one candidate."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tests.search.test_sampler import study_of
from tuner.search.observations import Observation
from tuner.search.sampler import CandidateSampler
from tuner.search.slack_limits import SlackLimits
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.space import Candidates
from tuner.testing.studies import probe_with

LIMITS_W = (100, 150, 200, 250, 300)
CANDIDATES = Candidates.from_configurations(
    Configuration.of(micro_batch=b, power_limit_W=w) for b in (1, 8) for w in LIMITS_W
)
CONFIGURATIONS = CANDIDATES.configurations
MEMBERS = [np.arange(5), np.arange(5, 10)]


def slack() -> SlackLimits:
    return SlackLimits(CONFIGURATIONS, MEMBERS, np.repeat([0, 1], 5))


def observed(candidate: int, power_W: float, rse: float = 0.0) -> Observation:
    return Observation(candidate, CONFIGURATIONS[candidate], 1.0, power_W, math.nan, rse)


def test_limits_above_one_that_cannot_bind_equal_it() -> None:
    limits = slack()
    assert set(limits.closed([observed(2, 110.0)])) == {1, 3, 4}  # 200 W; 150 W > 1.3 x 110 W, too
    assert limits.equal_to == {1: 2, 3: 2, 4: 2}
    assert set(slack().closed([observed(2, 120.0)])) == {3, 4}
    assert slack().closed([observed(2, 190.0)]) == []  # it may bind at 200 W


def test_the_error_of_power_and_a_cap_that_was_active_speak_against_it() -> None:
    assert set(slack().closed([observed(2, 110.0, rse=0.02)])) == {3, 4}
    assert slack().closed([replace(observed(2, 110.0), power_capped=True)]) == []


def test_measured_settings_and_other_launches_stay_as_they_are() -> None:
    limits = slack()
    assert set(limits.closed([observed(4, 110.0), observed(3, 110.0)])) == {1, 2}
    assert set(limits.closed([observed(4, 110.0)])) == {1, 2, 3}  # measurements that are replaced
    (note,) = limits.notes
    assert "limits above 143 W cannot bind; 2 further power limits" in note


def test_a_search_probes_one_of_them() -> None:
    sampler = CandidateSampler(CANDIDATES, seed=0)
    study = study_of(sampler)
    probed: list[Configuration] = []

    def answer(configuration: Configuration) -> tuple[float, float]:
        draws_W = 70.0 if configuration.micro_batch == 1 else 280.0
        limit_W = float(configuration.get("power_limit_W"))  # type: ignore[arg-type]
        power_W = min(draws_W, limit_W)
        return (draws_W / power_W) ** 0.5 / configuration.micro_batch**0.3, power_W

    while visited := probe_with(sampler, study, answer):
        probed += visited
    assert sum(one.micro_batch == 1 for one in probed) == 1
    assert sum(one.micro_batch == 8 for one in probed) == 5

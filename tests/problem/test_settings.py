"""Windows of the probes of a search: rough where they are measured again, else to the target."""

from __future__ import annotations

import pytest

from tuner.problem.settings import SearchSettings
from tuner.workload.records.probe import SEARCH_MIN_S, WindowPolicy


def test_what_is_measured_again_is_measured_roughly_first() -> None:
    settings = SearchSettings()
    rough = settings.window_of("search")
    assert (rough.target_se, rough.min_s) == (settings.window.search_se, SEARCH_MIN_S)
    assert rough.max_s == settings.window.max_s
    assert settings.window_of("baseline") == settings.window_of("verify") == rough


def test_a_baseline_that_is_not_verified_is_measured_to_the_target() -> None:
    settings = SearchSettings(verify=False)
    assert settings.window_of("baseline") == settings.window
    assert settings.window_of("search").target_se == settings.window.search_se


@pytest.mark.parametrize("error", [0.0, 0.01])
def test_a_search_can_be_as_precise_as_the_target(error: float) -> None:
    window = WindowPolicy(search_se=error)
    assert window.rough is window


def test_a_shorter_window_than_that_of_a_search_stays() -> None:
    assert WindowPolicy(min_s=0.5).rough.min_s == 0.5

"""Optuna's own contract for samplers, inherited: with candidates and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from optuna.samplers import BaseSampler
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    MultiObjectiveSamplerTestCase,
    RelativeSamplerTestCase,
)

from search_spaces.configuration import Configuration
from search_spaces.space import Candidates
from tuner.sampler import CandidateSampler

CANDIDATES = Candidates.from_configurations(
    Configuration.of(data_parallel=d, clock_MHz=c) for d in (1, 2, 4) for c in (900, 1200, 1400)
)


class _Contract(BasicSamplerTestCase, RelativeSamplerTestCase, MultiObjectiveSamplerTestCase):
    pass


class TestWithoutCandidates(_Contract):
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        return CandidateSampler


class TestWithCandidates(_Contract):
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        return lambda: CandidateSampler(CANDIDATES, seed=0)

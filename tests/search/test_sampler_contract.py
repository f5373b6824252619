"""Optuna's own contract for samplers, inherited by each kind of planner."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from optuna.samplers import BaseSampler, RandomSampler
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    MultiObjectiveSamplerTestCase,
    RelativeSamplerTestCase,
)

from tuner.search.optuna_samplers import StockSampler
from tuner.search.sampler import CandidateSampler
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.space import Candidates

CANDIDATES = Candidates.from_configurations(
    Configuration.of(data_parallel=d, clock_MHz=c) for d in (1, 2, 4) for c in (900, 1200, 1400)
)


class _Contract(BasicSamplerTestCase, RelativeSamplerTestCase, MultiObjectiveSamplerTestCase):
    pass


class TestCandidateSampler(_Contract):
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        return lambda: CandidateSampler(CANDIDATES, seed=0)


class TestStockSampler(_Contract):
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        return lambda: StockSampler(CANDIDATES, RandomSampler(seed=0))

"""Candidates as Optuna parameters, and back."""

from __future__ import annotations

import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution

from tests.search.test_candidate_planner import CANDIDATES
from tuner.search.sampler import ParameterEncoding
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import UnknownName
from tuner.search_spaces.space import Candidates


def test_distributions_are_ranges_where_levels_are_even_and_levels_where_not() -> None:
    distributions = ParameterEncoding(CANDIDATES).distributions
    assert distributions["clock_MHz"] == IntDistribution(600, 1400, step=200)
    assert distributions["micro_batch"] == CategoricalDistribution([1, 2, 4])
    assert distributions["zero_stage"] == CategoricalDistribution([0, 1, 3])
    assert distributions["activation_checkpointing"] == CategoricalDistribution(["full", "none"])
    assert "tensor_parallel" not in distributions


def test_a_clock_left_to_the_device_is_a_level_of_its_own() -> None:
    candidates = Candidates.from_configurations(
        [Configuration.of(clock_MHz=c) for c in (600, 800)] + [Configuration.of()]
    )
    encoding = ParameterEncoding(candidates)
    assert encoding.distributions == {"clock_MHz": CategoricalDistribution([None, 600, 800])}
    for i, configuration in enumerate(candidates.configurations):
        assert encoding.index_of_params(encoding.params_of(configuration)) == i


def test_every_candidate_survives_the_way_to_parameters_and_back() -> None:
    encoding = ParameterEncoding(CANDIDATES)
    for i, configuration in enumerate(CANDIDATES.configurations):
        params = encoding.params_of(configuration)
        for name, value in params.items():
            distribution = encoding.distributions[name]
            assert distribution._contains(distribution.to_internal_repr(value))
        assert encoding.index_of_params(params) == i


def test_parameters_of_no_candidate_have_no_number() -> None:
    encoding = ParameterEncoding(CANDIDATES)
    params = encoding.params_of(CANDIDATES.configurations[0])
    assert encoding.index_of_params({**params, "zero_stage": 3, "data_parallel": 1}) is None
    with pytest.raises(UnknownName, match="zero_stage"):
        encoding.index_of_params({k: v for k, v in params.items() if k != "zero_stage"})

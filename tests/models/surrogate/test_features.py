"""Features: every varying knob becomes columns in [0, 1], constant ones vanish."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.models.prior import Prediction
from tuner.models.surrogate.features import FeatureMap, feature_knobs
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates


def features_of(*configurations: Configuration) -> FeatureMap:
    return FeatureMap(Candidates.from_configurations(configurations))


def test_a_degree_is_logarithmic_and_a_constant_knob_is_dropped() -> None:
    features = features_of(
        *(Configuration.of(data_parallel=d, tensor_parallel=2) for d in (1, 2, 4, 16))
    )
    assert features.matrix[:, 0] == pytest.approx([0, 0.25, 0.5, 1])
    assert features.matrix.shape[1] == 1


def test_a_category_of_four_takes_four_columns_and_of_two_one() -> None:
    four = features_of(*(Configuration.of(zero_stage=z) for z in range(4)))
    assert (four.matrix == np.eye(4)).all()
    two = features_of(*(Configuration.of(optimizer_offload=o) for o in ("none", "cpu")))
    assert sorted(two.matrix[:, 0]) == [0, 1]


def test_a_clock_left_to_the_device_stands_at_the_highest_and_says_so() -> None:
    features = features_of(
        Configuration.of(),
        Configuration.of(clock_MHz=800),
        Configuration.of(clock_MHz=1000),
        Configuration.of(clock_MHz=1400),
    )
    assert features.matrix[:, 0] == pytest.approx([1, 0, 1 / 3, 1])
    assert features.matrix[:, 1] == pytest.approx([1, 0, 0, 0])


def test_clocks_of_each_stage_take_a_column_each() -> None:
    features = features_of(
        Configuration.of(clock_MHz=1000),
        Configuration.of(clock_MHz=(1000, 1400)),
        Configuration.of(clock_MHz=(1400, 1200)),
    )
    assert features.matrix == pytest.approx(np.array([[0, 0], [0, 1], [1, 0.5]]))


@pytest.mark.parametrize(
    ("values", "middle"),
    [
        ((8, 32, 128), 0.5),  # spans more than a factor of four: logarithmic
        ((100, 150, 300), 0.25),  # does not: linear
        ((-1, 0, 3), 0.25),  # not positive: linear
    ],
)
def test_an_unlisted_number_is_read_by_its_values(values: tuple[int, ...], middle: float) -> None:
    features = features_of(*(Configuration(Settings(batch_size=v)) for v in values))
    assert features.matrix[:, 0] == pytest.approx([0, middle, 1])


def test_an_unlisted_text_is_one_hot() -> None:
    features = features_of(*(Configuration(Settings(method=m)) for m in ("b", "a", "c")))
    assert (features.matrix == np.eye(3)[[1, 0, 2]]).all()


def test_a_single_candidate_still_has_a_column() -> None:
    assert features_of(Configuration.of()).matrix.tolist() == [[0.0]]


def test_an_unseen_configuration_is_read_by_the_same_scales() -> None:
    features = features_of(*(Configuration.of(data_parallel=d) for d in (1, 4)))
    row = features.transform([Configuration.of(data_parallel=2), Configuration.of(data_parallel=8)])
    assert row[:, 0] == pytest.approx([0.5, 1.5])
    assert features.transform([]).shape == (0, 1)


class _Prior:
    def predict(self, configurations: list[Configuration]) -> Prediction:
        degree = np.array([c.data_parallel for c in configurations], dtype=float)
        return Prediction(8.0 / degree, 100 * degree, degree)


def test_a_prior_tells_its_logs_and_adds_no_column() -> None:
    candidates = Candidates.from_configurations(
        Configuration.of(data_parallel=d) for d in (1, 2, 4)
    )
    features = FeatureMap(candidates, prior=_Prior())
    assert features.matrix.shape[1] == 1
    logs = features.prior_log([Configuration.of(data_parallel=8), candidates.configurations[0]])
    assert np.exp(logs) == pytest.approx(np.array([[1, 800], [8, 100]]))
    assert (features.prior_log(np.array([0])) == logs[1:]).all()


def test_varying_knobs_lists_launch_knobs_first() -> None:
    both = [Configuration.of(zero_stage=z, clock_MHz=c) for z in (0, 1) for c in (900, 1000)]
    assert feature_knobs(both) == ["zero_stage", "clock_MHz"]


@pytest.mark.parametrize("odd", [(), ("a", 1), (None, 2)])
def test_a_list_that_is_not_one_number_a_stage_is_one_hot(odd: tuple[object, ...]) -> None:
    """A trace is a file, and may say so of a knob."""
    levels = (odd, 1000, (1000, 1400))
    features = features_of(*(Configuration(Settings(clock_MHz=level)) for level in levels))
    assert sorted(map(tuple, features.matrix)) == sorted(map(tuple, np.eye(3)))

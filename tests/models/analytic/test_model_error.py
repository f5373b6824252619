"""Joint errors of predictions, and the probes that reduce them."""

import math

import numpy as np
import pytest

from tuner.models.analytic.model import LAUNCH_SD, ModelError, Spread, most_informative
from tuner.search_spaces.configuration import Configuration

CONFIGURATIONS = [
    Configuration.of(data_parallel=d, zero_stage=z, micro_batch=m, **live)
    for d in (1, 2, 4)
    for z in (0, 1)
    for m in (1, 2, 4)
    for live in ({}, {"clock_MHz": 800}, {"clock_MHz": 1400})
]
TIME, POWER = Spread(0.08, 0.04), Spread(0.05, 0.06)


@pytest.fixture(scope="module")
def error() -> ModelError:
    return ModelError(CONFIGURATIONS, time=TIME, power=POWER)


def test_draws_have_the_errors_that_are_stated(error: ModelError) -> None:
    time, power = error.draw(20_000, seed=1)
    assert time.std(axis=0) == pytest.approx(error.time_sd, rel=0.03)
    assert power.std(axis=0) == pytest.approx(error.power_sd, rel=0.03)
    at_top = [i for i, c in enumerate(CONFIGURATIONS) if c.live.get("clock_MHz") != 800]
    assert error.time_sd[at_top] == pytest.approx(np.hypot(TIME.shared, TIME.own))


def test_what_all_share_cancels_in_a_ratio(error: ModelError) -> None:
    time, energy = error.ratio_sd(0)
    assert time[0] == energy[0] == 0
    drawn_time, drawn_power = error.draw(20_000, seed=2)
    ratio = drawn_time - drawn_time[:, :1]
    assert ratio.std(axis=0) == pytest.approx(time, rel=0.03, abs=1e-12)
    both = drawn_time + drawn_power
    assert (both - both[:, :1]).std(axis=0) == pytest.approx(energy, rel=0.03, abs=1e-12)
    # Neighbours err more alike than configurations that differ in every knob.
    near = CONFIGURATIONS.index(Configuration.of(data_parallel=1, zero_stage=0, micro_batch=2))
    far = CONFIGURATIONS.index(Configuration.of(data_parallel=4, zero_stage=1, micro_batch=4))
    assert 0 < time[near] < time[far]


def _left(features: np.ndarray, weight: np.ndarray, rows: list[int]) -> float:
    """Weighted variance left after probes, by the normal equations."""
    seen = features[rows]
    precision = np.eye(features.shape[1]) + seen.T @ seen / LAUNCH_SD**2
    return float(weight @ np.einsum("ij,jk,ik->i", features, np.linalg.inv(precision), features))


def test_the_chosen_probes_leave_less_than_random_ones(error: ModelError) -> None:
    features = error.energy_features()
    weight = np.random.default_rng(3).random(len(features)) ** 3
    chosen = most_informative(features, weight, first=5, count=5)
    assert chosen[0] == 5
    assert len(set(chosen)) == 5
    rng = np.random.default_rng(4)
    others = [
        _left(features, weight, [5, *map(int, rng.choice(len(features), 4, replace=False))])
        for _ in range(50)
    ]
    assert _left(features, weight, chosen) < min(others)
    by_one = [_left(features, weight, chosen[:n]) for n in range(1, 6)]
    assert by_one == sorted(by_one, reverse=True)


def test_one_configuration_has_the_shared_error_alone() -> None:
    error = ModelError(CONFIGURATIONS[:1], time=TIME, power=POWER)
    assert error.time_sd == pytest.approx([TIME.shared])
    assert most_informative(error.energy_features(), np.ones(1), 0, 10) == [0]


def test_intervals_hold_the_known_error_of_the_device() -> None:
    """On A100 half of the published runs are 13.7 % off: a 90 % interval of 12 % would be wrong."""
    from tuner.search_spaces.cluster import load_device

    known = Spread.of("step time")
    assert Spread.of("step time", load_device("GH200-96GB")) == known
    a100 = Spread.of("step time", load_device("A100-SXM-80GB"))
    assert 0.674 * math.hypot(a100.shared, a100.own) == pytest.approx(0.099)
    assert a100.own == known.own  # what changes the order is not known there
    for nothing_known in ("B200-SXM-180GB", "V100-SXM2-16GB"):
        assert Spread.of("step time", load_device(nothing_known)) == known
    assert Spread.of("power", load_device("A100-SXM-80GB")) == Spread.of("power")


def test_few_tokens_of_a_gpu_in_a_pass_widen_the_error_and_share_it() -> None:
    """512 tokens on A100 were predicted twice too fast, with the error of 8,192."""
    short, other, long = (
        Configuration.of(data_parallel=8, micro_batch=micro_batch) for micro_batch in (1, 2, 4)
    )
    error = ModelError([short, other, long], sequence_length=512)
    plain = ModelError([short, other, long])
    assert error.time_sd[0] > 1.5 * plain.time_sd[0]
    assert error.power_sd[0] > 1.5 * plain.power_sd[0]
    assert error.time_sd[1:] == pytest.approx(plain.time_sd[1:])
    time, energy = error.ratio_sd(0)
    assert time[0] == energy[0] == 0
    assert time[2] > plain.ratio_sd(0)[0][2]
    drawn, _ = error.draw(20_000, seed=0)
    assert drawn.std(axis=0) == pytest.approx(error.time_sd, rel=0.05)
    features = error.energy_features()
    assert (features[0] @ features[0]) > 1.5 * (features[2] @ features[2])
    sharded = Configuration.of(data_parallel=4, sequence_parallel=2, micro_batch=2)
    assert ModelError([sharded], sequence_length=1000).time_sd > ModelError([sharded]).time_sd

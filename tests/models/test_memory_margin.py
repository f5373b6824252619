"""The margin of predicted memory: peaks and failures move it, and only as far as they tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.studies import METER, measured
from tests.support.surrogate_data import CANDIDATES, GoodPrior
from tuner.models.memory_margin import (
    ALONE_BIAS,
    MEMORY_BIAS,
    MEMORY_SPREAD,
    MemoryMargin,
    learned_margin,
)
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.planner import PlanningState
from tuner.workload.records.probe import ProbeRecord, ProbeRequest

SIZES = np.array([40e9, 70e9, 79e9, 81e9, 90e9, 160e9])


def margin() -> MemoryMargin:
    return MemoryMargin(80e9)


def test_before_any_probe_the_prediction_is_the_median() -> None:
    fits = margin().probability_of_fitting(SIZES)
    assert (np.diff(fits) < 0).all()
    assert fits[0] > 0.99
    assert fits[-1] < 0.01
    assert margin().probability_of_fitting([80e9])[0] == pytest.approx(0.5, abs=1e-6)
    assert margin().factor == pytest.approx((1.0, MEMORY_BIAS), rel=1e-3)


def test_peaks_shift_it_by_what_they_were_off() -> None:
    here = margin()
    for predicted in (20e9, 40e9, 50e9):
        here.measured(predicted, 1.2 * predicted)
    centre, width = here.factor
    # Normal prior and normal evidence: the conjugate posterior.
    precision = 1 / MEMORY_BIAS**2 + 3 / MEMORY_SPREAD**2
    assert centre == pytest.approx(np.exp(3 / MEMORY_SPREAD**2 * np.log(1.2) / precision), rel=1e-3)
    assert width == pytest.approx(precision**-0.5, rel=1e-2)
    assert here.probability_of_fitting([70e9])[0] < 0.3 < margin().probability_of_fitting([70e9])[0]


def test_running_out_is_evidence_that_the_peak_was_above() -> None:
    here = margin()
    here.ran_out(70e9)
    assert (here.probability_of_fitting(SIZES) < margin().probability_of_fitting(SIZES)).all()
    assert here.factor[0] > np.exp(np.log(80 / 70) * 0.5)
    surprised = margin()
    surprised.ran_out(160e9)  # nobody thought it would fit: nothing is learned
    assert surprised.factor[0] == pytest.approx(1.0, abs=1e-3)


def test_fitting_against_the_odds_is_evidence_too() -> None:
    here = margin()
    here.fitted(90e9)
    assert here.factor[0] < 0.95
    assert (here.probability_of_fitting(SIZES) > margin().probability_of_fitting(SIZES)).all()


def test_its_probabilities_are_right() -> None:
    """Of what it calls 70 to 90 %, 70 to 90 % fit (clusters drawn from its own assumptions)."""
    rng = np.random.default_rng(0)
    called, came = [], []
    for _ in range(300):
        bias = MEMORY_BIAS * rng.standard_normal()
        predicted = rng.uniform(50e9, 110e9, 12)
        true = predicted * np.exp(bias + MEMORY_SPREAD * rng.standard_normal(12))
        here = margin()
        for guess, peak in zip(predicted[:4], true[:4], strict=True):
            if peak > 80e9:
                here.ran_out(guess)
            else:
                here.measured(guess, peak)
        called += list(here.probability_of_fitting(predicted[4:]))
        came += list(true[4:] <= 80e9)
    probability, fits = np.array(called), np.array(came)
    for low, high in ((0.1, 0.4), (0.4, 0.7), (0.7, 0.95)):
        inside = (probability > low) & (probability <= high)
        assert fits[inside].mean() == pytest.approx(probability[inside].mean(), abs=0.08)


def test_a_failure_that_nothing_explains_condemns_nobody() -> None:
    here = margin()
    here.ran_out(10e9)  # the host's memory, or a leak
    assert here.probability_of_fitting([60e9])[0] > 0.9


def test_a_study_learns_its_margin() -> None:
    predicted = np.array([40e9, 70e9, 75e9, 60e9])
    learned = learned_margin(80e9, predicted, {0: 48e9, 1: np.inf, 3: np.nan})
    alone = margin()
    alone.measured(40e9, 48e9)
    alone.ran_out(70e9)
    alone.fitted(60e9)
    assert learned.factor == alone.factor
    assert learned.probability_of_fitting(predicted)[2] < 0.2


def test_a_program_alone_on_one_device_is_known_better() -> None:
    """At 85 % of the memory it is sure to fit, where others' buffers leave that open."""
    alone, beside = (MemoryMargin(1.0, bias=bias) for bias in (ALONE_BIAS, MEMORY_BIAS))
    fits = [float(each.probability_of_fitting([0.85])[0]) for each in (alone, beside)]
    assert fits[0] > 0.9 > fits[1]
    over = [float(each.probability_of_fitting([1.2])[0]) for each in (alone, beside)]
    assert over[0] < 0.1 < over[1]
    assert alone.probability_of_fitting([1.0]) == pytest.approx(0.5)


def test_a_search_learns_the_margin_from_its_probes() -> None:
    prior = GoodPrior()
    memory_bytes = float(np.median(prior.predict(list(CANDIDATES)).memory_bytes))
    planner = CandidatePlanner(CANDIDATES, prior=prior, seed=0, memory_bytes=memory_bytes)
    light = CANDIDATES[int(np.argmin(prior.predict(list(CANDIDATES)).memory_bytes))]
    request = ProbeRequest("p0000", light.launch, (light.live,))
    peak = replace(measured(light.live), peak_memory_bytes=int(memory_bytes))
    before, after = (
        planner._fits(planner._observe(PlanningState(records)))
        for records in ((), (ProbeRecord(request, (peak,), METER),))
    )
    assert (after <= before).all()
    assert (after < 0.5 * before).any()

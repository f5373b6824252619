"""What two runs recommend, compared with each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.results import large_result
from tuner.comparison import compare_runs
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job


def test_a_run_against_itself_differs_in_nothing():
    result = large_result()
    found = compare_runs(result, result)
    assert not found.energy.shown
    assert not found.step_time.shown


def test_the_recommended_points_are_compared():
    first = large_result()
    cheap = [replace(p, energy_to_solution_kJ=0.8 * p.energy_to_solution_kJ) for p in first.points]
    by_key = {p.configuration: p for p in cheap}
    second = replace(
        first,
        name="new",
        points=tuple(cheap),
        best=by_key[first.best.configuration],
        baseline=by_key[first.baseline.configuration],
    )
    found = compare_runs(first, second)
    assert found.a.startswith("gpt-h100: ")
    assert found.b.startswith("new: ")
    assert found.energy.relative == pytest.approx(-0.2)
    assert found.energy.shown
    assert found.step_time.relative == pytest.approx(0.0)
    assert compare_runs(second, first).energy.relative == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"steps": 7}, "they train tiny-gpt, 10,000 steps and tiny-gpt, 7 steps"),
        ({"source": "predicted"}, "one was measured and the other was predicted"),
        ({"scope": "cpu"}, "their energy has the scopes"),
        ({"global_batch": 64}, "a step trains a global batch of 32 and of 64"),
    ],
)
def test_what_must_not_be_compared_is_not(change, phrase):
    job = replace(load_job("tiny-gpt"), global_batch=32)
    first = replace(large_result(), job=job)
    points = first.points
    if "source" in change:
        points = tuple(replace(p, source="predicted") for p in points)
    if "scope" in change:
        points = tuple(replace(p, meter=replace(p.meter, scope="cpu")) for p in points)
    second = replace(first, points=points, steps=change.get("steps", first.steps))
    if "global_batch" in change:
        second = replace(second, job=replace(job, **change))
    with pytest.raises(InputError, match="cannot be compared: ") as caught:
        compare_runs(first, second)
    assert phrase in str(caught.value)

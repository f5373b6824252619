"""Explanation of a point: the parts add up, knobs bought what the truth says."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from tests.support.studies import modelled_study, run_replay, table_point, write_table
from tuner.display.export import rows
from tuner.display.report import render_report
from tuner.models.analytic.model import AnalyticModel
from tuner.search_spaces.errors import UnknownName

PARTS_W = {"gpu": 400.0, "grace": 90.0, "backward: gpu": 600.0}


@pytest.fixture(scope="module")
def modelled(tmp_path_factory):
    """A study of a real job on modelled probes."""
    return modelled_study(tmp_path_factory.mktemp("runs"), max_probes=9)


def test_the_parts_add_up_to_what_was_measured(modelled) -> None:
    said = modelled.explain("best")
    best = modelled.best
    step_s = best.time_to_solution_s / modelled.steps
    step_J = 1000 * best.energy_to_solution_kJ / modelled.steps
    assert math.fsum(said.time_s.values()) == pytest.approx(step_s)
    assert math.fsum(said.energy_J.values()) == pytest.approx(step_J)
    predicted = AnalyticModel(modelled.job, modelled.cluster).predict([best.configuration])
    assert said.model_error["step time"] == pytest.approx(predicted.step_time_s[0] / step_s - 1)
    assert list(said.time_s.values()) == sorted(said.time_s.values(), reverse=True)


def test_it_can_be_read_and_sent(modelled) -> None:
    said = modelled.explain("baseline")
    text = str(said)
    assert "Where the time of a step goes" in text
    assert "(estimated)" in text
    again = json.loads(json.dumps(said.to_json()))
    assert again["point"]["configuration"] == modelled.baseline.configuration.to_json()
    with pytest.raises(UnknownName):
        modelled.explain("nothing")


@pytest.fixture(scope="module")
def on_a_superchip(modelled):
    windows = dict(modelled.windows)
    best = modelled.best.configuration
    told = replace(windows[best][0], parts_W=PARTS_W)
    shorter = replace(told, window_s=told.window_s / 2, parts_W={"gpu": 1.0})
    windows[best] = (windows[best][0], shorter, told)
    return replace(modelled, windows=windows)


def test_the_parts_of_a_superchip_are_those_of_its_longest_window(on_a_superchip, modelled) -> None:
    said = on_a_superchip.explain("best")
    assert said.parts_W == PARTS_W
    assert "window          GPU 400 W, Grace 90 W" in str(said)
    assert "backward        GPU 600 W" in str(said)
    assert json.loads(json.dumps(said.to_json()))["parts_W"] == PARTS_W
    assert "Power by part" not in str(modelled.explain("best"))


def test_the_parts_of_a_superchip_stand_in_page_and_file(on_a_superchip, modelled) -> None:
    page = render_report(on_a_superchip)
    assert "<h2>Power by part" in page
    assert re.search(r">600 W</td><td[^>]*></td></tr>", page)
    assert "Power by part" not in render_report(modelled)
    told = [row for row in rows(on_a_superchip) if row["gpu_W"] is not None]
    assert [(row["gpu_W"], row["grace_W"], row["chosen"]) for row in told] == [(400, 90, True)]
    assert "cpu_W" not in told[0]
    assert not any(name.endswith("gpu_W") for name in rows(modelled)[0])


def test_what_a_knob_bought_covers_the_truth(tmp_path) -> None:
    """On a table whose truth is known, at a point whose neighbours were measured or not."""
    result = run_replay(
        write_table(tmp_path / "t"), runs_dir=tmp_path / "runs", report=False, max_probes=14
    )
    said = result.explain("best")
    assert said.time_s == {}
    assert any("no job" in note for note in said.notes)
    here = said.point.configuration
    shape, speed = here.get("shape"), here.get("speed")
    right = total = 0
    for effect in said.knobs:
        other = (effect.instead_of, speed) if effect.knob == "shape" else (shape, effect.instead_of)
        truth = table_point(shape, speed)[0] / table_point(*other)[0] - 1
        _, low, high = effect.time
        right += low - 0.01 <= truth <= high + 0.01
        total += 1
    assert total >= 4
    assert right / total >= 0.7
    baseline = result.baseline.configuration
    for effect in said.knobs:
        assert effect.of_baseline == (baseline.get(effect.knob) == effect.instead_of)
        assert f"{effect.knob}={effect.value} instead of {effect.instead_of}" in effect.sentence

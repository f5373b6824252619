"""Why a point is as it is: the parts add up, knobs bought what the truth says, guidelines hold."""

from __future__ import annotations

import json
import math

import pytest

from tuner.results.guidelines import check_guidelines
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import UnknownName
from tuner.testing.results import NVML, point
from tuner.testing.studies import modelled_study, run_replay, table_point, write_table


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
    # The runner answers with the model's own time, bent by 0 to 20 %.
    assert -0.2 < said.model_error["step time"] <= 0.001
    assert list(said.time_s.values()) == sorted(said.time_s.values(), reverse=True)


def test_it_can_be_read_and_sent(modelled) -> None:
    said = modelled.explain("baseline")
    text = "\n".join(said.lines())
    assert "Where the time of a step goes" in text
    assert "(estimated)" in text
    assert "What was published" in text
    again = json.loads(json.dumps(said.to_json()))
    assert again["point"]["configuration"] == modelled.baseline.configuration.to_json()
    with pytest.raises(UnknownName):
        modelled.explain("nothing")


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


FOLLOWS = "At fixed clocks the configurations that train faster also use less energy"


def verdicts(points) -> dict[str, str]:
    return {g.text.split(":")[0]: g.verdict for g in check_guidelines(points)}


def of(time_s: float, power_W: float, **knobs):
    return point(Configuration.of(knobs), time_s, power_W, NVML, spread=0.005)


def test_offloading_that_saves_energy_at_more_power_holds() -> None:
    points = [
        of(100, 400, data_parallel=4, micro_batch=2),
        of(90, 410, data_parallel=4, micro_batch=2, optimizer_offload="cpu"),
        of(85, 420, data_parallel=4, micro_batch=2, optimizer_offload="async"),
    ]
    said = verdicts(points)
    assert said["Offloading the optimizer saves energy on tightly coupled processors"] == "holds"
    assert said["Offloading does not lower power"] == "holds"
    key = "Asynchronous optimizer offloading uses less energy than synchronous"
    assert said[key] == "holds"
    assert said["Activation checkpointing saves energy"] == "not tested"


def test_a_guideline_that_fails_here_is_said_with_its_points() -> None:
    points = [
        of(100, 100, micro_batch=1),
        of(140, 100, micro_batch=1, activation_checkpointing="full"),
    ]
    (found,) = [g for g in check_guidelines(points) if "checkpointing" in g.text]
    assert found.verdict == "fails"
    assert "energy fell in 0, rose in 1" in found.evidence
    assert "40 % more energy" in found.evidence


def test_differences_within_their_errors_show_nothing() -> None:
    points = [of(100, 100, micro_batch=1), of(100.2, 100, micro_batch=2)]
    assert verdicts(points)["A larger micro-batch uses less energy"] == "not shown"


@pytest.mark.filterwarnings("error")
def test_launches_that_all_take_the_same_time_show_no_rank_correlation() -> None:
    points = [of(100, 100 + size, micro_batch=size) for size in (1, 2, 4, 8)]
    assert verdicts(points)[FOLLOWS] == "not shown"
    points = [of(100 * size, 100, micro_batch=size) for size in (1, 2, 4, 8)]
    assert verdicts(points)[FOLLOWS] == "holds"


def test_the_valley_and_the_slack_of_pipelines() -> None:
    points = []
    for pipeline in (1, 2):
        for clock in (300, 600, 900, 1200, 1500):  # both have their least in between
            share = 0.9 if pipeline == 1 else 0.5
            time_s = 100 * (share * 1500 / clock + 1 - share)
            power_W = 80 + 220 * (clock / 1500) ** 3
            points.append(of(time_s, power_W, pipeline_parallel=pipeline, clock_MHz=clock))
    said = verdicts(points)
    assert said["Energy over the clock is a valley"] == "holds"
    assert said["Pipeline parallelism tolerates a lower clock better than data parallelism"] == (
        "holds"
    )
    assert said["The configuration that is tuned for time is not the one that uses least energy"]


def test_nothing_measured_says_nothing() -> None:
    assert check_guidelines([]) == ()

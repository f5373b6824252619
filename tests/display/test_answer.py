"""The final answer: short, the recommendation first, and a menu whose commands work."""

from __future__ import annotations

from dataclasses import replace
from html import unescape

import pytest

from tests.golden import prepared
from tests.support.results import failed, large_result, small_result
from tuner.api import load_result
from tuner.display.report import render_report
from tuner.display.text import _short_role, answer_lines, menu, summary_lines
from tuner.display.view import View
from tuner.problem.constraints import Constraints
from tuner.problem.settings import StopReason
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.workload.scripts.script_job import ScriptJob


def test_the_menu_names_each_point_once():
    result = large_result()
    rows = menu(result)
    names = [name for words, _ in rows for name in words.split(", ")]
    assert names == ["fastest", "knee", "least energy"]
    assert len({point.configuration for _, point in rows}) == len(rows)
    points = {name: point for words, point in rows for name in words.split(", ")}
    fastest_s = min(p.time_to_solution_s for p in result.points)
    assert points["fastest"].time_to_solution_s == fastest_s
    least_kJ = min(p.energy_to_solution_kJ for p in result.points)
    assert points["least energy"].energy_to_solution_kJ <= 1.01 * least_kJ


def test_ten_times_as_long_for_the_same_energy_is_offered_to_nobody():
    result = large_result()
    knee, least = (result.choose(Constraints(objective=o)).point for o in ("knee", "energy"))
    for share, offered in ((0.9985, knee), (0.9, least)):
        slow = replace(
            least,
            energy_to_solution_kJ=knee.energy_to_solution_kJ * share,
            time_to_solution_s=10 * knee.time_to_solution_s,
        )
        changed = replace(result, points=(knee, slow), front_points=(knee, slow), best=knee)
        points = {name: point for words, point in menu(changed) for name in words.split(", ")}
        assert points["least energy"].configuration == offered.configuration


@pytest.mark.parametrize("make", [large_result, small_result])
def test_the_answer_is_short_and_begins_with_what_to_do(make):
    result = make()
    lines = answer_lines(result)
    assert lines[0] == result.headline
    assert len(lines) <= 14
    assert all(len(line) <= 80 for line in lines if "  " in line.strip())  # the table
    text = "\n".join(lines)
    assert text.count("\n> ") == 1
    assert "Spent: " in text
    assert f"tuner show {result.name}" in text
    assert "micro_batch=" not in text.replace(lines[0], "").replace("\n".join(lines[1:3]), "")


def test_a_choice_beside_the_menu_has_a_row_of_its_own():
    result = large_result()
    in_menu = [point.configuration for _, point in menu(result)]
    other = next(
        p
        for p in result.points
        if p.configuration not in in_menu and p.configuration != result.baseline.configuration
    )
    advice = replace(result.recommendation, point=other)
    result.__dict__["recommendation"] = advice  # as the cached property would keep it
    assert "> recommended" in "\n".join(answer_lines(result))


def test_a_search_that_left_nothing_gives_no_reason_and_one_that_a_limit_ended_gives_it():
    result = large_result()
    complete = replace(result, stop=StopReason("exhausted"))
    assert not any("search ended" in line for line in answer_lines(complete))
    limited = replace(result, stop=StopReason("time", {"search_s": 80.0}))
    assert "The search ended: its 80 s are over." in answer_lines(limited)
    nothing = replace(complete, points=(), front_points=(), best=None, baseline=None)
    assert nothing.stopped in answer_lines(nothing)


def test_a_point_is_named_once_and_the_knee_only_where_it_is_nothing_else():
    names = ["fastest, knee, least energy", "fastest, knee", "knee", "knee, least energy"]
    assert [_short_role(n) for n in names] == ["best in both", "fastest", "knee", "least energy"]


def test_nothing_measured_and_unmet_requests_are_told():
    result = large_result()
    failure = failed("p0003", "out_of_memory", "98 of 85 GB", "")
    empty = replace(
        result, points=(), front_points=(), best=None, baseline=None, failures=(failure, failure)
    )
    lines = answer_lines(empty)
    assert lines[0] == "Nothing was measured, so there is nothing to recommend."
    assert lines[1].startswith("Failed: p0003: out of memory: 98 of 85 GB, and 1 more (tuner sh")
    assert any(line.startswith("Spent: ") for line in lines)  # nothing found, and yet paid for
    unmet = replace(result, choice=replace(result.choice, met=False, sentence="The deadline ..."))
    assert "The deadline ..." in answer_lines(unmet)


def test_failures_are_counted_where_most_probes_worked_and_else_explained():
    result = large_result()
    failures = (
        failed("p0003", "out_of_memory", "98 of 85 GB", ""),
        failed("p0004", "crash", "", ""),
    )

    def shown(**changes: object) -> str:
        return "\n".join(answer_lines(replace(result, failures=failures, **changes)))

    spent = replace(result.spent, probes=5)
    assert " in 5 probes (2 failed)" in shown(spent=spent)
    assert "Failed: " not in shown(spent=spent)
    # Half of the search, or all of it but today: why is part of the answer.
    for few in (
        shown(spent=replace(spent, probes=4)),
        shown(spent=spent, points=result.points[:1]),
    ):
        assert "Failed: p0003: out of memory: 98 of 85 GB, and 1 more" in few
        assert "failed)" not in few


OVER = "the program ended by itself after 500 optimizer steps; give it at least 2,000 steps"


def test_a_training_that_is_over_too_soon_is_no_failure():
    result = large_result()
    over, crash = failed("p0003", "ended", OVER, ""), failed("p0004", "crash", "lost column", "")
    shown = "\n".join(answer_lines(replace(result, failures=(over, over))))
    assert f"Too short: p0003: {OVER}, and 1 more" in shown
    assert "failed" not in shown.lower()
    spent = replace(result.spent, probes=9)
    both = "\n".join(answer_lines(replace(result, failures=(over, crash), spent=spent)))
    assert "(1 failed)" in both
    assert f"Too short: p0003: {OVER}\n" in both
    # Where it is all that is known, it is the answer.
    nothing = {"points": (), "front_points": (), "best": None, "baseline": None}
    alone = answer_lines(replace(result, failures=(over,), **nothing))
    assert alone[0].startswith("Keep what you run today: the training is over before it can be")
    assert not any("no candidate" in line for line in alone)
    mixed = answer_lines(replace(result, failures=(over, crash), **nothing))
    assert mixed[0] == "Nothing was measured, so there is nothing to recommend."
    assert [line[:10] for line in mixed[1:3]] == ["Failed: p0", "Too short:"]


@pytest.mark.parametrize("kind", ["ended", "crash"])
def test_a_search_that_measured_nothing_is_shown_with_all_that_it_said(kind: str) -> None:
    """`tuner show` had a heading of an empty front, and not why there is no answer."""
    result = large_result()
    failures = (failed("p0003", kind, OVER, ""), failed("p0004", kind, OVER, ""))
    nothing = {"points": (), "front_points": (), "best": None, "baseline": None}
    empty = replace(result, failures=failures, stop=StopReason("stopped"), **nothing)
    shown, ended = summary_lines(empty), answer_lines(empty)
    said = [line for line in ended if f"tuner show {empty.name}" not in line]
    assert said[0] == shown[0]
    assert set(said) <= set(shown)
    assert sum(OVER in line for line in shown) == 2  # each failure, where the answer has the first
    assert not any(line.startswith(("Front of", "Choice:", "nothing measured")) for line in shown)


def test_a_program_without_a_step_is_a_failure():
    failure = failed(
        "p0003", "no_steps", "the program ended by itself without an optimizer step", ""
    )
    shown = "\n".join(answer_lines(replace(large_result(), failures=(failure,) * 9)))
    assert "Failed: p0003: no optimizer step: the program ended by itself without" in shown


def test_the_next_step_continues_a_search_that_found_too_little(tmp_path):
    prepared(tmp_path)
    found = load_result(
        tmp_path / "runs" / "refuted"
    )  # a kept baseline, and launches that would tell
    lines = answer_lines(found)
    assert "Next: the same command with --name refuted and higher limits" in lines
    assert not any("makes them" in line for line in lines)
    assert "Next: the same command with --name refuted" in answer_lines(
        replace(found, stop=StopReason("stopped"))
    )
    trains = load_result(tmp_path / "runs" / "script")
    assert "Next: tuner apply script" in answer_lines(trains)


def test_a_ranking_of_parallelisms_is_said_to_be_the_programs():
    result = small_result()
    job = load_job()
    assert View(replace(result, job=job)).notices == ""  # nothing splits the model
    split = replace(
        result.points[0],
        configuration=Configuration.of(data_parallel=1, tensor_parallel=2, micro_batch=1),
    )
    mixed = replace(result, job=job, points=(*result.points, split))
    assert "of this program" in View(mixed).notices
    assert View(mixed).notices in answer_lines(mixed)
    assert View(mixed).notices in unescape(render_report(mixed))
    assert View(replace(mixed, job=None)).notices == ""  # a recorded table
    script = ScriptJob(
        name="mine", model={}, sequence_length=0, global_batch=8, steps=9, precision="fp32"
    )
    assert View(replace(mixed, job=script)).notices == ""


def test_an_estimate_that_only_follows_the_time_is_no_column():
    result = small_result()
    meter = replace(result.baseline.meter, name="estimated")

    def of_power(by: float) -> list[str]:
        points = tuple(
            replace(p, meter=meter, power_W=16.0 * by**i) for i, p in enumerate(result.points)
        )
        today = next(p for p in points if p.configuration == result.baseline.configuration)
        return answer_lines(replace(result, points=points, front_points=points, baseline=today))

    assert any("no meter, 16.0 W x time)" in line for line in of_power(1.0))
    assert not any(line.startswith("> ") and "kJ" in line for line in of_power(1.0))
    assert any("energy, estimated" in line for line in of_power(1.1))

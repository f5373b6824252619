"""One figure for one quantity: a configuration's is what its windows showed, and a saving is the
ratio of two of these; where the verdict counts another one, one sentence says so."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from tests.answer.test_judge import judge_of
from tests.answer.test_posterior import launch
from tests.answer.test_recommendation import result_of
from tests.support.results import large_result
from tests.support.studies import METER, measured
from tuner.answer.parts import Interval, Point
from tuner.display.advice import headline
from tuner.display.report import render_report, result_html
from tuner.display.text import answer_lines, choice_lines, summary_lines
from tuner.display.view import View
from tuner.formatting import change, number
from tuner.problem.constraints import Constraints
from tuner.problem.settings import StopReason
from tuner.result import Result
from tuner.search_spaces.configuration import Settings
from tuner.workload.node.measure.stragglers import ForeignLoad
from tuner.workload.records.probe import ProbeRecord, ProbeRequest


def searched_study() -> Result:
    """A result of windows in 4 launches, whose posterior shrinks the saving that they show."""
    rng = np.random.default_rng(0)
    records = [launch(rng, 0, 0, 0.0), launch(rng, 1, 1, 0.0, time=-0.6)]
    records += [launch(rng, 2, 0, 0.0), launch(rng, 3, 2, 0.0, time=-0.1)]
    return result_of(judge_of(records))


@pytest.mark.parametrize(
    "show",
    [
        lambda result: "\n".join(summary_lines(result)),
        lambda result: "\n".join(answer_lines(result)),
        lambda result: "\n".join(
            choice_lines(result.choose(Constraints(budget_kJ=budget(result))))
        ),
        lambda result: unescape(re.sub(r"<[^>]*>", " ", result_html(result))),
        lambda result: text_of_page(result),
    ],
    ids=["front", "answer", "choose", "notebook", "report"],
)
def test_one_saving_is_shown_for_the_choice(show) -> None:  # type: ignore[no-untyped-def]
    result = searched_study()
    advice = result.recommendation
    assert advice.point is result.best
    assert advice.energy is not None
    assert advice.time is not None
    text = show(result)
    for found, saved, lost in (
        (advice.energy, "less energy", "more energy"),
        (advice.time, "less time", "more time"),
    ):
        stated = change(1 + found.relative, 1.0, saved, lost).removesuffix(" " + saved.split()[1])
        assert stated in text


def budget(result: Result) -> float:
    """The least budget that the choice meets."""
    return result.best.energy_to_solution_kJ * 1.0001


def text_of_page(result: Result) -> str:
    """The upper part of the report, without the tables and plots below it."""
    page = render_report(result).partition("<section>")[0]
    return unescape(re.sub(r"<[^>]*>", " ", page))


#: Step times of launches on a machine that others use, and what they used of it.
NOISY = {0: (0.259, 0.260, 0.414), 1: (0.073, 0.084, 0.088), 2: (0.065, 0.070, 0.082)}
SURFACES = {
    "front": lambda result: "\n".join(summary_lines(result)),
    "answer": lambda result: "\n".join(answer_lines(result)),
    "notebook": lambda result: unescape(re.sub(r"<[^>]*>", " ", result_html(result))),
    "report": lambda result: text_of_page(result),
}


def noisy_study(
    times: Mapping[int, Sequence[float]], share: float, *, rise_W: float = 0.0
) -> Result:
    """A result of launches with these step times, beside others who use this share of the cores.

    The power rises from one configuration to the next.
    """
    rows = [(size, time_s) for size, each in times.items() for time_s in each]
    records = []
    for place, (size, time_s) in enumerate(rows):
        window = measured(Settings(clock_MHz=1), time_s=time_s, power_W=20.0 + size * rise_W)
        request = ProbeRequest(f"p{place:04d}", Settings(data_parallel=2, micro_batch=size + 1))
        records.append(ProbeRecord(request, (ForeignLoad(share).widened(window),), METER))
    return result_of(judge_of(records))


@pytest.mark.parametrize("surface", SURFACES)
def test_figures_on_a_busy_machine_are_those_of_the_windows(surface: str) -> None:
    """Of three launches between 0.259 and 0.414 s the table once said 0.158 s."""
    result = noisy_study(NOISY, 0.63)
    text = SURFACES[surface](result)
    view = View(result)
    units = view.units.telling(view.pairs(result.points)) if surface == "answer" else view.units
    for point in (result.baseline, result.best):
        shown = surface != "notebook" or point is result.best  # of the front alone
        assert (number(point.time_to_solution_s / units.s, units.digits) in text) == shown
        assert number(point.inferred.time_to_solution_s / units.s) not in text
    # Where the headline says that no saving is known, no sentence states one.
    assert "so no saving is known" in text
    assert "Allowing for chance" not in text


def windows_of(rng: np.random.Generator) -> dict[int, list[float]]:
    """Launches of up to six configurations, one to five each, that differ up to tenfold."""
    spread = rng.choice([0.001, 0.02, 0.3, 1.0])
    return {
        size: list(np.exp(rng.normal(-2 - 0.3 * size, spread, rng.integers(1, 6))))
        for size in range(rng.integers(2, 7))
    }


@pytest.mark.parametrize("seed", range(12))
def test_no_figure_of_any_table_lies_outside_its_windows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times = windows_of(rng)
    result = noisy_study(times, rng.choice([0.0, 0.05, 0.63, 0.99]))
    units = View(result).units
    rows = "\n".join(summary_lines(result))
    for point in result.points:
        seen = times[int(point.configuration.get("micro_batch")) - 1]
        time_s = point.time_to_solution_s / result.steps
        assert time_s == pytest.approx(np.median(seen))
        low, high = point.time_interval_s
        assert low <= point.time_to_solution_s <= high
        if point in result.front_points:
            assert number(point.time_to_solution_s / units.s) in rows
    shrunk = result.judged.shrunk(result.recommendation.promising or result.recommendation.point)
    none_known = "so no saving is known" in rows
    assert ("Allowing for chance" in rows) == (shrunk is not None and not none_known)


#: A row of the answer's table: time, its change, energy, its change.
_ROW = re.compile(
    r"(?:today|recommended|fastest|least energy|best in both|knee)"
    r"\s+([\d.,]+) \S+(?: +([-+]?\d+) %)?"
    r"\s+([\d.,]+) \S+(?: +([-+]?\d+) %)?"
)


@pytest.mark.parametrize("seed", range(24))
def test_a_reader_who_divides_two_figures_finds_the_percentage(seed: int) -> None:
    """Of 3.38 h and 3.84 h (+13.6 %) a headline said 13 % and a table 14 %."""
    rng = np.random.default_rng(seed)
    result = noisy_study(windows_of(rng), 0.0, rise_W=1.7)
    lines = answer_lines(result)
    rows = [found.groups() for line in lines if (found := _ROW.search(line))]
    (today, *others) = [[float((cell or "0").replace(",", "")) for cell in row] for row in rows]
    for time, slower, energy, more in others:
        assert round(100 * (time / today[0] - 1)) == slower
        assert round(100 * (energy / today[2] - 1)) == more
    advice = result.recommendation
    assert advice is not None
    if advice.action == "train" and advice.time is not None:
        # Headline, table and JSON are of one fact.
        shown = next(line for line in lines if line.startswith("> recommended"))
        for part in re.findall(r"(\d+) % (less|more) (?:energy|time)", lines[0]):
            assert f"{'-' if part[1] == 'less' else '+'}{part[0]} %" in shown
        told = result.to_json()["recommendation"]
        for name in ("energy", "time"):
            relative = told[name]["relative"]
            point, before = advice.point, result.baseline
            assert before is not None
            figure = "energy_to_solution_kJ" if name == "energy" else "time_to_solution_s"
            assert 1 + relative == pytest.approx(getattr(point, figure) / getattr(before, figure))


def test_the_saving_of_a_prediction_is_that_of_its_figures_too() -> None:
    """Where no launches are compared, the models' estimate may stand apart from a point's figures:
    13 % in a headline, 14 % in the table."""
    found = noisy_study({0: (0.2,), 1: (0.1,)}, 0.0)
    points = [
        replace(p, estimate=p.estimate._replace(time_to_solution_s=99.0))
        for p in found.points
        if p.estimate is not None
    ]
    today = next(p for p in points if p.configuration == found.today_configuration)
    other = next(p for p in points if p is not today)
    judge = replace(found.judged, points=points, baseline=today, posterior=None)
    differences = judge.differences(other)
    assert differences is not None
    assert 1 + differences[1].relative == pytest.approx(0.5)


def test_a_quiet_machine_needs_no_word_on_its_noise() -> None:
    result = noisy_study({0: (0.2, 0.2003, 0.1999), 1: (0.1, 0.1001), 2: (0.3,)}, 0.02)
    assert "Allowing for chance" not in "\n".join(answer_lines(result))
    assert "other processes" not in headline(result)


def test_a_busy_machine_is_the_cause_that_the_headline_names() -> None:
    result = noisy_study({0: (0.25, 0.41), 1: (0.24, 0.40), 2: (0.26,)}, 0.63)
    assert result.recommendation.action == "keep"
    assert headline(result).endswith(
        "other processes used 63 % of the cores: measure again when it is quiet "
        "(--wait-until-quiet)."
    )


def test_a_card_does_not_deny_the_saving_that_the_headline_names() -> None:
    """Below "97 % less time (96 % sure)" a card said "97 % less; no difference shown"."""
    result = noisy_study({0: (0.6, 0.2, 0.5), 1: (0.13, 0.065, 0.156)}, 0.0)
    saved = result.recommendation.time
    assert saved.named
    assert not saved.shown
    assert "74 % less time" in headline(result)
    cards = SURFACES["report"](result)
    assert "74 % less than today" in re.sub(r"\s+", " ", cards)
    assert "no difference shown" not in cards
    # A point that is not recommended is grey where its difference is not significant.
    kept = replace(result)
    kept.__dict__["recommendation"] = replace(
        result.recommendation, action="keep", point=result.baseline
    )
    assert "no difference shown" in render_report(kept)


def test_a_change_that_was_measured_beside_other_work_says_so() -> None:
    """Threads that wait for each other on cores that others use took 30 times as long: one thread
    was "97 % less time" without a word on the load."""
    times = {0: (0.6, 0.61, 0.6, 0.62), 1: (0.017, 0.0171, 0.017, 0.017)}
    busy, quiet = noisy_study(times, 0.3), noisy_study(times, 0.0)
    assert busy.recommendation.action == quiet.recommendation.action == "train"
    told = [line for line in answer_lines(busy) if line.startswith("Measured while")]
    assert told == [
        "Measured while other processes used 30 % of the cores; it may save more or less without: "
        "measure again when it is quiet (--wait-until-quiet)."
    ]
    assert "Measured while" not in "\n".join(answer_lines(quiet))
    assert told[0] in "\n".join(summary_lines(busy))
    assert told[0] in SURFACES["report"](busy)


@pytest.mark.parametrize("apart", [9.0, 27.0])
def test_windows_on_a_busy_machine_promise_no_percentage(apart: float) -> None:
    """Figures 9 times apart were told as "may save 10 %"."""
    result = noisy_study({0: (0.36, 0.3), 1: (0.36 / apart,)}, 0.9)
    told = headline(result)
    assert told.startswith(
        "Keep what you run today for now: other processes used 90 % of the cores, so no saving is "
        "known; mb2 looked best (probability "
    )
    assert told.endswith("): measure again when it is quiet (--wait-until-quiet).")
    assert not re.search(r"% (less )?(energy|time)", told)
    quiet = headline(noisy_study({0: (0.36, 0.3), 1: (0.36 / apart,)}, 0.0))
    assert "so no saving is known" not in quiet


@pytest.mark.parametrize(
    ("times", "share", "denied"),
    [
        ({0: (0.36, 0.3), 1: (0.04,)}, 0.9, "so no saving is known"),
        ({0: (0.36, 0.3), 1: (0.12,)}, 0.9, "too uncertain to tell it from"),
        ({0: (0.36, 0.1), 1: (0.12, 0.5), 2: (0.09, 0.4)}, 0.9, "too uncertain to tell it from"),
    ],
)
def test_no_place_shows_a_saving_that_the_headline_denies(
    times: Mapping[int, Sequence[float]], share: float, denied: str
) -> None:
    """A table said "-82 %" under "no saving is known"."""
    result = noisy_study(times, share, rise_W=-3.0)
    assert denied in headline(result)
    assert not result.saving_known
    places = {name: surface(result) for name, surface in SURFACES.items()}
    chosen = result.choose(Constraints(objective="time"))
    places["choose"] = "\n".join(choice_lines(chosen))
    for name, text in places.items():
        assert not re.search(r"\d % (less|more) (energy|time)|(less|more) than today", text), name
        assert "A trade" not in text
    assert not _ROW_CHANGE.search(places["answer"])
    assert "best in both" not in places["answer"]
    assert result.to_json()["saving_known"] is False
    assert chosen.to_json()["saving_known"] is False
    # A comparison that is asked for says how little is known.
    for found in (result.compare().step_time, result.compare().energy):
        assert "no difference shown; if any, within" in found.sentence


@pytest.mark.parametrize(
    ("other", "share", "told"),
    [
        (0.12, 0.9, "too uncertain to tell it from the other, as other processes used 90 % of"),
        (0.36, 0.0, "Keep what you run today: only 2 of 8 configurations were tried."),
    ],
)
def test_a_busy_machine_is_the_reason_although_little_was_tried(
    other: float, share: float, told: str
) -> None:
    """A row of 9.55 min beside today's 16.1 min stood below "only 3 of 8 were tried"."""
    result = noisy_study({0: (0.36, 0.3), 1: (other,)}, share, rise_W=-3.0)
    limit = StopReason("max_probes", {"max_probes": 2, "reserved": 0})
    result = replace(result, about={**result.about, "candidates": 8}, stop=limit)
    assert result.too_little_tried
    assert result.recommendation.promising is None
    assert told in headline(result)


def test_a_saving_that_is_known_is_shown() -> None:
    result = noisy_study({0: (0.2, 0.2003), 1: (0.17, 0.1701)}, 0.0)
    assert result.saving_known
    assert _ROW_CHANGE.search(SURFACES["answer"](result))


#: A change of time or energy in a row of the answer's table.
_ROW_CHANGE = re.compile(r"^[> ] [a-z].* [-+]\d+ %", re.MULTILINE)


def test_a_saving_that_is_not_sure_promises_no_figure_of_chance() -> None:
    """Windows of 0.1 and 0.9 s were told as "probably saves 82 %", above "expect 29 %"."""
    lines = answer_lines(noisy_study({0: (0.1, 0.9), 1: (0.09, 0.095)}, 0.2))
    assert "mb2 probably saves energy (estimated) and time (" in lines[0]
    assert re.match(r"Allowing for chance .*, expect \d\d % less energy and \d\d % less", lines[1])
    steady = answer_lines(noisy_study({0: (0.2, 0.21), 1: (0.19, 0.196)}, 0.0))
    assert "Allowing for chance" not in "\n".join(steady)
    assert re.search(r"saves? \d+ % energy|\d+ % less", steady[0])


def counted_point(point: Point, energy: float, time: float) -> Point:
    """A point whose verdict counts these factors of its measured energy and time."""
    figures = {
        "energy_to_solution_kJ": energy * point.energy_to_solution_kJ,
        "time_to_solution_s": time * point.time_to_solution_s,
    }
    assert point.estimate is not None
    return replace(point, estimate=point.estimate._replace(**figures))


@pytest.mark.parametrize(
    ("apart", "counted", "told"),
    [
        # An energy of 0.18 of today's counts as 0.183: 82 % is shown, and 82 % is expected.
        (0.18, 1.02, False),
        (0.18, 1.12, True),
        (0.5, 1.03, False),
        (0.5, 1.05, True),
        (0.99, 1.03, True),
        # The figures of both count otherwise alike: their saving is what the table shows.
        (1.0, 1.0, False),
    ],
)
@pytest.mark.parametrize("both", [1.0, 0.8])
def test_two_points_are_told_apart_alike_from_either_side(
    apart: float, counted: float, told: bool, both: float
) -> None:
    """Ratios of 0.5 and of 2 are one saving: 0.48 and 0.5 differed less than 2.08 and 2."""
    found = noisy_study({0: (0.2, 0.2001), 1: (0.2, 0.2001)}, 0.0)
    today = counted_point(found.baseline, both, both)
    other = next(p for p in found.points if p.configuration != today.configuration)
    other = replace(
        other,
        energy_to_solution_kJ=apart * today.energy_to_solution_kJ,
        time_to_solution_s=today.time_to_solution_s,
    )
    other = counted_point(other, counted * both, both)
    judge = replace(found.judged, points=[today, other], baseline=today)
    assert (judge.shrunk(other) is not None) == told
    assert (judge.against(other).shrunk(today) is not None) == told


def test_without_a_baseline_the_ends_of_an_interval_are_inside_it() -> None:
    found = noisy_study({0: (0.2, 0.2001), 1: (0.2, 0.2001)}, 0.0)
    point = counted_point(found.baseline, 1.0, 1.0)
    judge = replace(found.judged, points=[point], baseline=None)
    energy_kJ, time_s = point.energy_to_solution_kJ, point.time_to_solution_s
    for low, high, told in ((1.0, 1.0, False), (0.9, 0.99, True), (1.01, 1.1, True)):
        about = Interval(low * time_s, high * time_s)
        assert (judge.shrunk(replace(point, time_interval_s=about)) is not None) == told
        about = Interval(low * energy_kJ, high * energy_kJ)
        assert (judge.shrunk(replace(point, energy_interval_kJ=about)) is not None) == told


def test_json_holds_the_saving_of_the_posterior_for_a_choice() -> None:
    result = searched_study()
    found = result.choose(Constraints(budget_kJ=budget(result))).to_json()
    advice = result.to_json()["recommendation"]
    for name in ("energy", "time"):
        assert found[name]["relative"] == advice[name]["relative"]
    same = result.choose(Constraints(deadline_s=1e9)).to_json()
    assert set(same) == set(found)


def test_one_unit_for_the_whole_answer() -> None:
    result = large_result()
    larger = [
        replace(
            point,
            energy_to_solution_kJ=100 * point.energy_to_solution_kJ,
            time_to_solution_s=100 * point.time_to_solution_s,
        )
        for point in result.points
    ]
    by_name = {point.configuration: point for point in larger}
    result = replace(
        result,
        points=tuple(larger),
        front_points=tuple(by_name[p.configuration] for p in result.front_points),
        best=by_name[result.best.configuration],
        baseline=by_name[result.baseline.configuration],
    )
    assert View(result).units.energy == "kWh"
    assert result.spent.energy_kJ < 3600
    for lines in (answer_lines(result), summary_lines(result)):
        text = "\n".join(lines)
        assert f"Spent: {View(result).units.energy_text(result.spent.energy_kJ)} and" in text
        assert not re.search(r"\d [kM]?J\b", text)


def test_a_search_that_took_far_more_than_its_points_has_a_unit_of_its_own() -> None:
    result = large_result()
    small = replace(result.spent, energy_kJ=0.05), "50.0 J"
    large = replace(result.spent, energy_kJ=19.6), "19.6 kJ"
    points = tuple(replace(p, energy_to_solution_kJ=0.05) for p in result.points)
    result = replace(
        result, points=points, front_points=points[:1], best=points[0], baseline=points[1]
    )
    for spent, text in (small, large):
        assert View(replace(result, spent=spent)).spent == text


def test_a_saving_of_few_windows_is_told_with_what_chance_leaves_of_it() -> None:
    text = answer_lines(noisy_study({0: (0.2, 0.22, 0.24), 1: (0.15,)}, 0.0))
    assert "32 % less time" in text[0]
    assert text[1].startswith("Allowing for chance in few or noisy windows, expect 28 % less")


def test_a_saving_that_every_launch_shows_has_a_narrow_interval_and_one_figure() -> None:
    result = noisy_study({0: (0.2, 0.2, 0.2), 1: (0.1, 0.1, 0.1)}, 0.0)
    differences = result.judged.differences(result.best)
    assert differences is not None
    for each in differences:
        assert each.low < each.relative < each.high
        assert each.high - each.low < 0.1
    assert "Allowing for chance" not in "\n".join(answer_lines(result))

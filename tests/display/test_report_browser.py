"""The report in a real browser: plots, hover, sliders, and a console that stays silent."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.display.report_page import answer_of_page
from tests.support.browser import draw_figure
from tests.support.results import (
    NVML,
    attained,
    hostile_result,
    large_result,
    point,
    records_of,
    result_of,
    result_of_phased,
    small_result,
)
from tuner.answer.parts import Explanation, KnobEffect, ResolvedRequest
from tuner.display.html import choice_grid, limit_values
from tuner.display.plots import front_figure
from tuner.display.view import View
from tuner.problem.constraints import Constraints
from tuner.result import Result
from tuner.search_spaces.configuration import Configuration
from tuner.workload.records.probe import ProbeRecord

pytestmark = pytest.mark.needs("chromium")

# Asks the page itself, once it is drawn: what Plotly drew, what a hover over a point of the front
# shows, and what the page becomes on paper.
CHECK = """
  const plots = [...document.querySelectorAll(".plot")];
  const front = document.getElementById("plot-front");
  const curve = front.data.findIndex((t) => t.name === "front");
  Plotly.Fx.hover(front, [{ curveNumber: curve, pointNumber: 0 }]);
  await wait(300);
  const hover = [...front.querySelectorAll(".hoverlayer text")].map((t) => t.textContent).join(" ");
  const asked = Array.from(front.data[curve].hovertext)[0];
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const drawn = plots.map((p) => p.querySelectorAll("svg.main-svg").length > 0);
  const filled = plots.map((p) => p.querySelectorAll(".point, .js-line").length > 0);
  window.dispatchEvent(new Event("beforeprint"));
  await wait(300);
  const paper = Math.max(...plots.map((p) => p.querySelector("svg.main-svg").clientWidth));
  const folded = document.querySelectorAll("details:not([open])").length;
  window.dispatchEvent(new Event("afterprint"));
  await wait(300);
  const back = front.querySelector("svg.main-svg").clientWidth - front.clientWidth;
  return { drawn, filled, hover, asked, wide, paper, folded, back, alerts: window.alerts || 0 };
"""
# What sticks out of the page sideways once it is drawn and all is unfolded. Preformatted logs may
# scroll inside themselves.
OVERFLOW = """
  document.querySelectorAll("details").forEach((part) => (part.open = true));
  await wait(300);
  const width = document.documentElement.clientWidth;
  const over = [...document.querySelectorAll("main *")]
    .filter((e) => !e.closest(".plot") && e.getBoundingClientRect().right > width + 1)
    .map((e) => e.tagName + "." + e.className + " " + e.textContent.slice(0, 40));
  const plots = [...document.querySelectorAll(".plot svg.main-svg")]
    .filter((e) => e.getBoundingClientRect().right > width + 1).map(() => "plot");
  return { inner: width, over: [...over, ...plots],
    wide: document.documentElement.scrollWidth - width };
"""
# Where the plot begins, what the front shows before and after its box is ticked, and what a click
# on a point puts into the tile of its time.
FRONT = """
  const front = document.getElementById("plot-front");
  const shown = () => front.data.filter((t) => t.visible !== false && t.name).map((t) => t.name);
  const begins = front.getBoundingClientRect().top + window.scrollY;
  const before = shown();
  const more = document.getElementById("front-more");
  if (more) more.click();
  await wait(300);
  const point = JSON.parse(document.getElementById("front-points").textContent)[0];
  front.emit("plotly_click", { points: [{ x: point.place[0], y: point.place[1] }] });
  const tile = document.querySelector('[data-tile="Time"] .value').textContent;
  return { begins, before, after: shown(), tile, asked: point.tiles.Time[0],
    left: document.documentElement.scrollWidth - innerWidth };
"""


@pytest.mark.parametrize(
    ("make", "width"),
    [
        (large_result, 500),
        pytest.param(hostile_result, 1200, marks=pytest.mark.slow),
        pytest.param(small_result, 1200, marks=pytest.mark.slow),
        pytest.param(large_result, 1200, marks=pytest.mark.long),
        pytest.param(hostile_result, 500, marks=pytest.mark.long),
        pytest.param(small_result, 500, marks=pytest.mark.long),
    ],
)
def test_report_in_a_browser(make, width: int, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    result = make()
    said = answer_of_page(result, tmp_path, CHECK, records=records_of(result), width=width)
    assert said["drawn"]
    assert all(said["drawn"])
    assert all(said["filled"])
    assert "On the front" in said["hover"]
    assert "P(non-dominated)" in said["hover"]
    for part in re.findall(r"(?:clock_MHz|micro_batch)=\d+", said["asked"]):
        assert part in said["hover"]
    assert said["alerts"] == 0
    assert said["wide"] <= 0, "the page scrolls sideways"
    assert said["paper"] <= 660
    assert said["folded"] == 0
    assert abs(said["back"]) <= 1


def full_result(run_dir: Path) -> tuple[Result, list[ProbeRecord]]:
    """A result with everything that a report can draw: band, predicted points, power, phases."""
    result, record = result_of_phased(run_dir)
    maybe = replace(result.points[1], source="predicted", windows=0, p_nondominated=0.4)
    maybe = replace(maybe, configuration=Configuration.of(micro_batch=16, clock_MHz=1234))
    whole = large_result()
    assert result.best is not None
    result = replace(
        result,
        front_points=(*whole.front_points, result.best),
        attainment=attained(whole),
        predicted=(maybe,),
    )
    return result, [record, *records_of(whole)]


def test_every_part_of_a_report_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.display.plots.explained", explanation)
    result, records = full_result(tmp_path)
    said = answer_of_page(result, tmp_path, CHECK, records=records)
    assert len(said["drawn"]) >= 5
    assert all(said["drawn"])
    assert all(said["filled"])
    assert said["wide"] <= 0


def explanation(result: Result) -> Explanation:
    """What knobs bought."""
    assert result.best is not None
    less = (-0.2, -0.3, -0.1)
    effect = KnobEffect("activation_checkpointing", "none", "full", less, less, less, True, True)
    return Explanation(result.best, knobs=(effect,))


@pytest.mark.slow
def test_at_the_width_of_a_phone_nothing_overflows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.display.plots.explained", explanation)
    # A headless window is at least 500 pixels wide, so the page is looked at in a frame of 375.
    result, records = full_result(tmp_path)
    said = answer_of_page(result, tmp_path, OVERFLOW, records=records, framed=(375, 800))
    assert said["inner"] == 375
    assert said["wide"] <= 0, "the page scrolls sideways"
    assert not said["over"], "these parts stick out"


@pytest.mark.parametrize(
    ("screen", "most_px", "dark"),
    [
        ((1400, 900), 300, False),
        pytest.param((400, 800), 700, True, marks=pytest.mark.slow),
        pytest.param((1400, 900), 300, True, marks=pytest.mark.long),
        pytest.param((400, 800), 700, False, marks=pytest.mark.long),
    ],
)
def test_the_front_comes_first(
    screen: tuple[int, int], most_px: int, dark: bool, tmp_path: Path
) -> None:
    result = large_result()
    result = replace(result, attainment=attained(result))
    said = answer_of_page(result, tmp_path, FRONT, framed=screen, dark=dark)
    assert said["begins"] < most_px
    assert set(said["before"]) == {"front", "today", "recommended"}
    more = ("dominated points", "80 % band of the true front", "its median")
    added = [name for name in said["after"] if name not in said["before"]]
    assert len(added) == 3
    assert all(name.startswith(more) for name in added)
    assert said["tile"].split() == said["asked"].split()
    assert said["left"] <= 0


def test_of_two_points_no_band_is_drawn() -> None:
    result = large_result()
    few = replace(result, front_points=result.front_points[:2], attainment=attained(result))
    names = [trace.name for trace in front_figure(few).data]
    assert "80 % band of the true front" not in names


@pytest.mark.slow
def test_a_figure_as_a_picture(tmp_path: Path) -> None:
    picture = draw_figure(front_figure(large_result()), tmp_path / "front.png", width=800, scale=1)
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (800, 480)


# Moves the sliders, and notes what is chosen and what the front's figure shows.
MOVE = """
  const part = document.getElementById("limits");
  const front = document.getElementById("plot-front");
  const seen = [{ ...part.choice, said: document.getElementById("limits-choice").textContent }];
  for (const [deadline, budget] of POSITIONS) {
    for (const [name, position] of [["deadline", deadline], ["budget", budget]]) {
      const slider = document.getElementById(`limit-${name}`);
      slider.value = position;
      slider.dispatchEvent(new Event("input"));
    }
    seen.push({ ...part.choice, said: document.getElementById("limits-choice").textContent,
      command: document.getElementById("limits-command").textContent });
  }
  const done = () => {
    const last = front.data?.at(-1);
    const lines = (front.layout?.shapes || []).length;
    return /your limits/.test(last?.name) && last.x[0] === part.choice.time && lines >= 2;
  };
  for (let i = 0; i < 300 && !done(); i++) await wait(100);
  const drawn = front.data.at(-1);
  const focusable = [...part.querySelectorAll("input")].every((each) => each.tabIndex === 0);
  return { seen, focusable, drawn: [drawn.x[0], drawn.y[0]],
    named: drawn.name, lines: front.layout.shapes.length,
    spoken: document.getElementById("limit-budget").getAttribute("aria-valuetext") };
"""


def failed_again() -> Result:
    """A result whose knee failed when it was launched again."""
    result = large_result()
    failed = frozenset({result.point("knee").configuration})
    return replace(result, judge=replace(result.judged, failed=failed))


def in_kilowatt_hours() -> Result:
    """Six points of some hours and kilowatt-hours."""
    points = [
        point(Configuration.of(micro_batch=2**i), 7200 * 1.3**i, 4000 / 1.6**i, NVML)
        for i in range(6)
    ]
    return result_of("cluster's job", points, points[0], best=2, request=ResolvedRequest())


@pytest.mark.needs("chromium")
@pytest.mark.parametrize(
    "make",
    [
        small_result,
        pytest.param(large_result, marks=pytest.mark.slow),
        pytest.param(failed_again, marks=pytest.mark.long),
        pytest.param(in_kilowatt_hours, marks=pytest.mark.slow),
    ],
)
def test_in_every_cell_the_page_shows_the_choice_of_the_command(
    make: Callable[[], Result], tmp_path: Path
) -> None:
    result = make()
    units = View(result).units
    grid = choice_grid(result, units)
    pairs = list(itertools.product(grid.deadlines_s, grid.budgets_kJ))
    rows, columns = range(len(grid.deadlines_s)), range(len(grid.budgets_kJ))
    positions = list(itertools.product(rows, columns))
    positions.append((len(rows) // 2, len(columns) // 2))  # the last one is drawn in the figure
    script = MOVE.replace("POSITIONS", json.dumps(positions))
    said = answer_of_page(result, tmp_path, script, wait_ms=40000)
    assert len(said["seen"]) == len(positions) + 1
    own = result.limits
    assert said["seen"][0]["budget"] == (own.budget_kJ and pytest.approx(own.budget_kJ / units.kJ))
    met = set()
    for (deadline_s, budget_kJ), seen in zip(pairs, said["seen"][1:-1], strict=True):
        found = result.choose(deadline_s=deadline_s, budget_kJ=budget_kJ)
        assert seen["time"] * units.s == pytest.approx(found.point.time_to_solution_s)
        assert seen["energy"] * units.kJ == pytest.approx(found.point.energy_to_solution_kJ)
        assert seen["met"] == found.met
        assert seen["said"].startswith("Nothing measured trains") != found.met
        met.add(found.met)
    assert met == {True, False}
    last = said["seen"][-1]
    assert said["drawn"] == [pytest.approx(last["time"]), pytest.approx(last["energy"])]
    assert said["named"] in ("within your limits", "nearest to your limits")
    assert said["lines"] >= 2
    assert said["spoken"].endswith(units.energy)
    assert said["focusable"]
    option = {"s": "s", "min": "min", "h": "h"}[units.time]
    assert f" --deadline {last['deadline']:g}{option} --budget " in last["command"]


def test_the_cells_are_the_choices_under_limits_that_are_read_as_they_are_shown() -> None:
    result = replace(
        large_result(), request=ResolvedRequest(Constraints(deadline_s=1e-3, budget_kJ=1e12))
    )
    units = View(result).units
    grid = choice_grid(result, units)
    # The run's own limits are among the values, however far they are from the front.
    assert grid.deadlines_s[0] == 1e-3
    assert grid.budgets_kJ[-2:] == (1e12, None)
    for row, deadline_s in enumerate(grid.deadlines_s[::6]):
        for column, budget_kJ in enumerate(grid.budgets_kJ[::6]):
            number, met = grid.cells[6 * row][6 * column]
            found = result.choose(deadline_s=deadline_s, budget_kJ=budget_kJ)
            assert (grid.points[number], met) == (found.point, found.met)
    for value in grid.budgets_kJ[:-2]:
        assert float(f"{value / units.kJ:.3g}") == pytest.approx(value / units.kJ)
    assert grid.points[grid.cells[-1][-1][0]] == result.choose().point


def test_a_training_of_unknown_length_has_no_sliders() -> None:
    job = SimpleNamespace(steps=None)
    assert choice_grid(replace(large_result(), job=job), View(large_result()).units) is None


def test_a_front_of_one_point_has_no_sliders() -> None:
    only = point(Configuration.of(micro_batch=1), 10.0, 100.0, NVML)
    result = result_of("one", [only], only, best=0)
    assert limit_values(View(result)) == {"sliders": []}

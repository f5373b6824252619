"""The report in a real browser: its plots are drawn, hover works, and the console stays silent."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.display.report_page import answer_of_page
from tests.support.browser import draw_figure
from tests.support.results import (
    attained,
    hostile_result,
    large_result,
    records_of,
    result_of_phased,
    small_result,
)
from tuner.answer.parts import Explanation, KnobEffect
from tuner.display.plots import front_figure
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

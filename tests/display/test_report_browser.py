"""The report in a real browser: its plots are drawn, hover works, and the console stays silent."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from tests.display.report_page import look
from tests.support.browser import draw_figure, dump_dom
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
from tuner.display.report import write_report
from tuner.result import Result
from tuner.search_spaces.configuration import Configuration
from tuner.workload.records.probe import ProbeRecord

pytestmark = pytest.mark.needs("chromium")

# Asks the page itself, once it is drawn: what Plotly drew, what a hover over a point of the front
# shows, and what the page becomes on paper.
CHECK = """
<script>
window.addEventListener("load", async () => {
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  await wait(600);
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
  const report = document.createElement("pre");
  report.id = "self-check";
  report.textContent = JSON.stringify(
    { drawn, filled, hover, asked, wide, paper, folded, back, alerts: window.alerts || 0 });
  document.body.append(report);
});
window.alert = () => { window.alerts = (window.alerts || 0) + 1; };
</script>
"""


# What sticks out of the page sideways once it is drawn and all is unfolded, told to the frame that
# holds it. Preformatted logs may scroll inside themselves.
FRAMED = """
<script>
window.addEventListener("load", async () => {
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  await wait(800);
  document.querySelectorAll("details").forEach((part) => (part.open = true));
  await wait(300);
  const width = document.documentElement.clientWidth;
  const over = [...document.querySelectorAll("main *")]
    .filter((e) => !e.closest(".plot") && e.getBoundingClientRect().right > width + 1)
    .map((e) => e.tagName + "." + e.className + " " + e.textContent.slice(0, 40));
  const plots = [...document.querySelectorAll(".plot svg.main-svg")]
    .filter((e) => e.getBoundingClientRect().right > width + 1).map(() => "plot");
  parent.postMessage(JSON.stringify({ inner: width, over: [...over, ...plots],
    wide: document.documentElement.scrollWidth - width }), "*");
});
</script>
"""


def check(
    path: Path, result: Result, width: int = 1200, records: Sequence[ProbeRecord] | None = None
) -> dict:
    write_report(result, path, records=records_of(result) if records is None else records)
    page = path.read_text("utf-8").replace("</head>", CHECK + "</head>", 1)
    path.write_text(page, encoding="utf-8")
    dom, console = dump_dom(path, width=width, wait_ms=8000)
    assert not console, console
    found = re.search(r'<pre id="self-check">(.*?)</pre>', dom, re.DOTALL)
    assert found, "the page's own check never finished"
    said: dict = json.loads(unescape(found[1]))
    return said


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
    said = check(tmp_path / "report.html", make(), width)
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
    said = check(tmp_path / "report.html", result, 1200, records)
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
    said = check_in_frame(tmp_path, result, records, 375)
    assert said["inner"] == 375
    assert said["wide"] <= 0, "the page scrolls sideways"
    assert not said["over"], "these parts stick out"


def check_in_frame(
    folder: Path, result: Result, records: Sequence[ProbeRecord], width: int
) -> dict:
    """What the report says of itself inside a frame of that width, in CSS pixels."""
    write_report(result, folder / "report.html", records=records)
    page = (folder / "report.html").read_text("utf-8").replace("</head>", FRAMED + "</head>", 1)
    (folder / "report.html").write_text(page, encoding="utf-8")
    (folder / "frame.html").write_text(
        f"""<iframe src="report.html" style="border:0;width:{width}px;height:800px"></iframe>
        <pre id="self-check"></pre>
        <script>addEventListener("message", (e) => {{
          document.getElementById("self-check").textContent = e.data; }});</script>""",
        encoding="utf-8",
    )
    dom, console = dump_dom(folder / "frame.html", width=800, wait_ms=8000)
    assert not console, console
    found = re.search(r'<pre id="self-check">(.+?)</pre>', dom, re.DOTALL)
    assert found, "the page's own check never finished"
    said: dict = json.loads(unescape(found[1]))
    return said


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
    found = look(replace(result, attainment=attained(result)), tmp_path, screen, dark=dark)
    assert found.begins_px < most_px
    assert set(found.before) == {"front", "today", "recommended"}
    more = ("dominated points", "80 % band of the true front", "its median")
    added = [name for name in found.after if name not in found.before]
    assert len(added) == 3
    assert all(name.startswith(more) for name in added)
    assert found.filled
    assert not found.errors
    assert found.sideways_px <= 0


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

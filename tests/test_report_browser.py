"""The report in a real browser: its plots are drawn, hover works, and the console stays silent."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
from browser import chromium, draw_figure, dump_dom
from sample_results import large_result, records_of, small_result
from test_report import hostile_result

from tuner.plots import front_figure
from tuner.report import write_report
from tuner.result import Result

pytestmark = pytest.mark.skipif(chromium() is None, reason="no chromium or google-chrome here")

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


def check(path: Path, result: Result, width: int = 1200) -> dict:
    write_report(result, path, records=records_of(result))
    page = path.read_text("utf-8").replace("</head>", CHECK + "</head>", 1)
    path.write_text(page, encoding="utf-8")
    dom, console = dump_dom(path, width=width, wait_ms=8000)
    assert not console, console
    found = re.search(r'<pre id="self-check">(.*?)</pre>', dom, re.DOTALL)
    assert found, "the page's own check never finished"
    said: dict = json.loads(unescape(found[1]))
    return said


@pytest.mark.parametrize("width", [1200, 500])
@pytest.mark.parametrize("make", [large_result, small_result, hostile_result])
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


def test_a_figure_as_a_picture(tmp_path: Path) -> None:
    picture = draw_figure(front_figure(large_result()), tmp_path / "front.png", width=800, scale=1)
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (800, 480)

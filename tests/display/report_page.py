"""Report in a real browser: where its plot begins, and what its console says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path

from tests.support.browser import dump_dom
from tuner.display.report import write_report
from tuner.result import Result

_ASK = """
<script>
window.addEventListener("load", async () => {
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  await wait(900);
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
  parent.postMessage(JSON.stringify({ begins, before, after: shown(), tile,
    asked: point.tiles.Time[0], left: document.documentElement.scrollWidth - innerWidth }), "*");
});
</script>
"""


@dataclass(frozen=True)
class Looked:
    """One page in one window.

    Attributes:
        begins_px: where the plot begins.
        before, after: what the front shows at first, and with its box ticked.
        filled: whether a click on a point put its time into the tile.
        sideways_px: by how much the page is wider than the window.
        errors: lines of the console.
    """

    begins_px: float
    before: Sequence[str]
    after: Sequence[str]
    filled: bool
    sideways_px: float
    errors: Sequence[str]


def look(result: Result, folder: Path, screen: tuple[int, int], *, dark: bool = False) -> Looked:
    """Open the report of a result in a window of this size and ask the page."""
    page, (width, height) = folder / "report.html", screen
    write_report(result, page)
    text = page.read_text("utf-8").replace("</head>", _ASK + "</head>", 1)
    page.write_text(text, encoding="utf-8")
    frame = folder / "frame.html"  # a headless window is at least 500 pixels wide
    frame.write_text(
        f"""<iframe src="report.html" style="border:0;width:{width}px;height:{height}px"></iframe>
        <pre id="answer"></pre><script>addEventListener("message", (e) => {{
          document.getElementById("answer").textContent = e.data; }});</script>""",
        encoding="utf-8",
    )
    dom, errors = dump_dom(frame, width=width + 50, wait_ms=9000, dark=dark)
    found = re.search(r'<pre id="answer">(.+?)</pre>', dom, re.DOTALL)
    if found is None:
        raise RuntimeError(f"the page did not answer: {errors}")
    said: Mapping = json.loads(unescape(found[1]))
    filled = said["tile"].split() == said["asked"].split()
    return Looked(
        said["begins"], said["before"], said["after"], filled, said["left"], tuple(errors)
    )

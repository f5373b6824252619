"""Report in a real browser, and what a script of a test in it answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

from tests.support.browser import dump_dom
from tuner.display.report import write_report
from tuner.result import Result
from tuner.workload.records.probe import ProbeRecord

#: Counts alerts, which a text of the user's may raise; runs the body of an async function once the
#: page is drawn, and shows what it returns.
_ASK = """<script>
window.alert = () => { window.alerts = (window.alerts || 0) + 1; };
window.addEventListener("load", async () => {
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  await wait(900);
  const answer = JSON.stringify(await (async () => { BODY })());
  if (parent !== window) return parent.postMessage(answer, "*");
  const shown = document.createElement("pre");
  shown.id = "self-check";
  shown.textContent = answer;
  document.body.append(shown);
});
</script>
"""
#: A headless window is at least 500 pixels wide, so a narrower one is a frame.
_FRAME = """<iframe src="report.html" style="border:0;width:{0}px;height:{1}px"></iframe>
<pre id="self-check"></pre><script>addEventListener("message", (e) => {{
  document.getElementById("self-check").textContent = e.data; }});</script>"""


def answer_of_page(
    result: Result,
    folder: Path,
    script: str,
    *,
    records: Sequence[ProbeRecord] = (),
    width: int = 1200,
    framed: tuple[int, int] | None = None,
    dark: bool = False,
    wait_ms: int = 9000,
) -> Any:
    """Open the report of a result, and return what a script in it returns.

    Args:
        script: the body of a function, which may `await wait(MS)`.
        framed: width and height of the frame in which the page is, instead of the window.
    """
    page, frame = folder / "report.html", folder / "frame.html"
    write_report(result, page, records=records)
    asking = _ASK.replace("BODY", script)
    page.write_text(page.read_text("utf-8").replace("</head>", asking + "</head>", 1), "utf-8")
    if framed is not None:
        width = framed[0] + 400
        frame.write_text(_FRAME.format(*framed), "utf-8")
    dom, console = dump_dom(frame if framed else page, width=width, wait_ms=wait_ms, dark=dark)
    assert not console, console
    found = re.search(r'<pre id="self-check">(.+?)</pre>', dom, re.DOTALL)
    assert found, "the page's own check never finished"
    return json.loads(unescape(found[1]))

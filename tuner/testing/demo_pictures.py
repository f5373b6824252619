"""Pictures of `tuner demo` for the README: its terminal as an animated SVG, its report as a PNG.

    python -m tuner.testing.demo_pictures docs

runs the demo's search, draws the live view after every probe, and then its answer. The SVG loads
nothing: its frames are Rich's, shown in turn by CSS. Without animation the answer alone is shown.
"""

from __future__ import annotations

import argparse
import io
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

import tuner
from tuner.cli.demo import CLUSTER, JOB, LABEL, PROBES, Pace
from tuner.display.answer import answer_lines
from tuner.display.live import LiveView
from tuner.results.result import Result
from tuner.testing.browser import screenshot

__all__ = ["animated", "draw"]

COLUMNS, ROWS = 128, 22
#: Seconds that a frame of the search is shown, and the answer.
FRAME_S, ANSWER_S = 1.3, 8.0
#: Rich's own format without its window, title and web font, which an image may not load.
FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>{styles} .{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace;
font-size: {char_height}px; line-height: {line_height}px }}</style>
<defs>{lines}</defs>
<rect fill="#1b1d1e" width="100%" height="100%" rx="8"/>
<g transform="translate({terminal_x}, {terminal_y})">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g></svg>"""


def _frame(lines: Sequence[Text | str] | LiveView, number: int) -> str:
    """Return one screen as SVG."""
    screen = Console(record=True, width=COLUMNS, height=ROWS, file=io.StringIO(), highlight=False)
    if isinstance(lines, LiveView):
        screen.print(Text("$ tuner demo", style="bold"))
        screen.print(lines.picture())
    else:
        for line in lines:
            screen.print(line, markup=False)
    rows = screen.export_text(clear=False).count("\n")
    for _ in range(ROWS - rows):
        screen.print()
    return screen.export_svg(
        title="", theme=MONOKAI, code_format=FORMAT, unique_id=f"frame{number}"
    )


def animated(frames: Sequence[str]) -> str:
    """Return an SVG that shows SVGs of one size in turn, the last one for longer."""
    total_s = FRAME_S * (len(frames) - 1) + ANSWER_S
    styles, groups = [], []
    for number, frame in enumerate(frames):
        last = number == len(frames) - 1
        begin = 100 * FRAME_S * number / total_s
        end = 100.0 if last else 100 * FRAME_S * (number + 1) / total_s
        hidden = f"0%, {begin:.3f}% {{ visibility: hidden }} " if number else ""
        after = "" if last else f"{end:.3f}%, 100% {{ visibility: hidden }}"
        styles.append(
            f"@keyframes show{number} {{ {hidden}{begin + 0.001:.3f}%, {end - 0.001:.3f}% "
            f"{{ visibility: visible }} {after} }} #part{number} {{ "
            f"visibility: {'visible' if last else 'hidden'}; "
            f"animation: show{number} {total_s:.1f}s step-end infinite }}"
        )
        groups.append(f'<g id="part{number}">{frame}</g>')
    box = re.search(r'viewBox="([^"]+)"', frames[0])
    assert box is not None
    return (
        f'<svg viewBox="{box[1]}" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{LABEL}">\n<style>{" ".join(styles)}</style>\n' + "\n".join(groups) + "</svg>"
    )


def _played(folder: Path) -> tuple[Result, list[str]]:
    """Run the demo's search; return its result and a frame of every probe, when it is half over."""
    frames: list[str] = []
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds / 2
        frames.append(_frame(view, len(frames)))
        now_s += seconds / 2

    pace = Pace(clock=lambda: now_s, sleep=sleep)
    pace.notify = view = LiveView(clock=pace.simulated_s, lines=False, title=LABEL)
    result = tuner.optimize(
        JOB,
        cluster=CLUSTER,
        search=tuner.SearchSettings(max_probes=PROBES),
        executor="simulated",
        name="demo",
        runs_dir=folder,
        on_progress=pace,
    )
    return result, frames


def draw(folder: Path) -> list[Path]:
    """Write demo.svg and demo-report.png into the folder; return their paths."""
    with tempfile.TemporaryDirectory() as runs:
        result, frames = _played(Path(runs))
        answer = [Text(f"$ tuner demo\n{LABEL}.\n"), *answer_lines(result)]
        shown = [str(line).replace(runs, "runs") for line in answer]
        frames.append(_frame(shown, len(frames)))
        svg = folder / "demo.svg"
        svg.write_text(animated(frames), encoding="utf-8")
        picture = screenshot(
            Path(runs) / "demo" / "report.html", folder / "demo-report.png", width=1100, height=1400
        )
    return [svg, picture]


def main() -> None:
    """Draw into the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Draw the pictures of tuner demo.")
    parser.add_argument("folder", type=Path)
    for path in draw(parser.parse_args().folder):
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

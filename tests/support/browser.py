"""A headless Chromium for tests and pictures: loads a page and hands back its DOM or a PNG.

    python -m tests.support.browser PAGE.html PICTURE.png [--width 1200] [--dark]

draws a picture of any HTML file (a report, or a Plotly figure written with `write_html`).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)
#: The page is shown as a dark system shows it.
_DARK = "--blink-settings=preferredColorScheme=0"


#: Names of the program, in the order of preference.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """Return the path of a Chromium or Chrome on this machine, or None."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def _run(page: Path | str, *flags: str, wait_ms: int, timeout_s: float) -> tuple[str, str]:
    binary = chromium()
    if binary is None:
        raise FileNotFoundError("no chromium or google-chrome on this machine")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [
                binary,
                *_FLAGS,
                f"--user-data-dir={profile}",
                f"--virtual-time-budget={wait_ms}",
                *flags,
                page if isinstance(page, str) else page.resolve().as_uri(),
            ],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=True,
        )
    return done.stdout, done.stderr


def dump_dom(
    page: Path | str,
    *,
    wait_ms: int = 4000,
    width: int = 1200,
    dark: bool = False,
    timeout_s: float = 120.0,
) -> tuple[str, list[str]]:
    """Return the DOM of a page (file or URL) after its scripts, and its lines on the console."""
    flags = ["--dump-dom", f"--window-size={width},900", *[_DARK] * dark]
    dom, log = _run(page, *flags, wait_ms=wait_ms, timeout_s=timeout_s)
    return dom, [line for line in log.splitlines() if ":CONSOLE" in line]


def screenshot(
    page: Path,
    picture: Path,
    *,
    width: int = 1200,
    height: int = 900,
    dark: bool = False,
    scale: float = 1.0,
    wait_ms: int = 4000,
    timeout_s: float = 120.0,
) -> Path:
    """Draw `page` as a PNG of `width` x `height` CSS pixels; a dark one as a dark system shows it.

    Headless windows are at least 500 pixels wide, so a narrower page is framed in one.
    """
    flags = [f"--screenshot={picture.resolve()}", f"--window-size={width},{height}"]
    flags.append(f"--force-device-scale-factor={scale}")
    if dark:
        flags.append(_DARK)
    if width >= 500:
        _run(page, *flags, wait_ms=wait_ms, timeout_s=timeout_s)
        return picture
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        frame.write_text(
            f'<body style="margin:0;background:#888"><iframe src="{page.resolve().as_uri()}" '
            f'style="border:0;width:{width}px;height:{height}px"></iframe>',
            encoding="utf-8",
        )
        _run(frame, *flags, wait_ms=wait_ms, timeout_s=timeout_s)
    return picture


def draw_figure(
    figure: Any,
    picture: Path,
    *,
    width: int = 900,
    height: int = 480,
    dark: bool = False,
    scale: float = 2.0,
) -> Path:
    """Draw one Plotly figure as a PNG, e.g. `draw_figure(front_figure(result), "docs/front.png")`;
    `dark` draws it in the report's dark colours."""
    from tuner.display.figures import DARK

    text = str(figure.to_json())
    if dark:
        text = re.sub("#[0-9a-f]{6}", lambda found: DARK.get(found[0], found[0]), text)
    shown = type(figure)(json.loads(text))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "figure.html"
        shown.update_layout(width=width, height=height)
        shown.write_html(page, config={"displayModeBar": False})
        text = page.read_text("utf-8").replace("<body>", '<body style="margin:0">', 1)
        page.write_text(text, encoding="utf-8")
        return screenshot(page, Path(picture), width=width, height=height, scale=scale)


def main() -> None:
    """Draw the HTML file that the command line names."""
    parser = argparse.ArgumentParser(description="Draw an HTML file as a PNG.")
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args()
    screenshot(
        given.page,
        given.picture,
        width=given.width,
        height=given.height,
        scale=given.scale,
        dark=given.dark,
    )


if __name__ == "__main__":
    main()

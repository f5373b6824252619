"""Target of power in watts that a file or a web server tells, read in a thread of its own."""

from __future__ import annotations

import contextlib
import math
import threading
import urllib.request
from pathlib import Path

from tuner.search_spaces.errors import InputError

#: Seconds between two readings, and those that a server may take.
EVERY_S, TIMEOUT_S = 1.0, 5.0
#: A target that changes by more than this factor counts when it is read a second time: a file may
#: be read while it is written.
JUMP = 2.0
#: Most bytes of a reading.
MOST = 4096


def watts_of(text: str) -> float | None:
    """Return the target of a text: a number of watts, or None for "none".

    Raises:
        InputError: it is neither.
    """
    word = text.strip().removesuffix("W").strip()
    if word.lower() == "none":
        return None
    with contextlib.suppress(ValueError):
        watts = float(word)
        if 0 < watts < math.inf:
            return watts
    raise InputError(f"{text.strip()[:40]!r} is no target: write a number of watts, or none")


class Signal:
    """Latest target of a source; the last good one stays in force if the source fails.

    Args:
        source: a file, or an address that begins with http:// or https://; or the watts of a target
            that stays as it is.

    Attributes:
        target_W: None: no limit.
        problem: why the source cannot be read, or that its target jumped; "" if all is well.

    Raises:
        InputError: the source cannot be read, or tells no target.
    """

    def __init__(self, source: str | float) -> None:
        self._source = str(source)
        self.problem, self._stays = "", not isinstance(source, str)
        try:
            self.target_W = watts_of(self._text())
        except OSError as error:
            raise InputError(f"--follow-power: {source} cannot be read: {error}") from error
        self._jumped: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        """Begin to follow the source."""
        if not self._stays:
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def _text(self) -> str:
        if self._stays:
            return self._source
        if self._source.startswith(("http://", "https://")):
            with urllib.request.urlopen(self._source, timeout=TIMEOUT_S) as answer:
                return str(answer.read(MOST).decode(errors="replace"))
        with Path(self._source).open("rb") as file:
            return file.read(MOST).decode(errors="replace")

    def read(self) -> None:
        """Take in what the source tells now."""
        try:
            watts = watts_of(self._text())
        except Exception as error:  # whatever a server answers, the training goes on
            self.problem = f"the power signal stopped: {error}; its last target stays"
            return
        before = self.target_W
        far = watts is not None and before is not None and not 1 / JUMP <= watts / before <= JUMP
        if far and watts != self._jumped:
            self._jumped = watts
            self.problem = f"the power signal jumped from {before:g} W to {watts:g} W"
            return
        self._jumped, self.target_W = None, watts
        if not far:
            self.problem = ""

    def _follow(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.read()

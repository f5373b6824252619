"""Optimizer steps of frameworks that no torch optimizer shows: a function returns, a line appears.

`state.options["step"]` says which (`tuner.workload.scripts.frameworks.parts.Step`). Nothing else
counts then.
"""

import functools
import re
import sys
from typing import Any

from . import frames, state, watching


def prepare() -> None:
    """Watch for the sign of a step that the agent names."""
    sign = state.options.get("step") or {}
    if sign.get("count", "optimizer") == "optimizer":
        return
    state.seen["counts"] = "program"
    if sign["count"] == "call":
        module, _, path = sign["call"].partition(":")
        frames.WhenImported([module], lambda name, made: _patch(made, path))
    else:
        line = re.compile(sign["line"])
        sys.stdout, sys.stderr = _Lines(sys.stdout, line), _Lines(sys.stderr, line)


def _patch(owner: Any, path: str) -> None:
    *parts, name = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        watching.step()
        return result

    setattr(owner, name, counted)


class _Lines:
    """Stream that counts a step for each line that matches; each rank must print them."""

    def __init__(self, stream: Any, line: re.Pattern[str]) -> None:
        self._stream, self._line, self._begun = stream, line, ""

    def write(self, text: str) -> int:
        """Write a text, and count the matching lines that it ends."""
        written: int = self._stream.write(text)
        *ended, self._begun = (self._begun + text).split("\n")
        for line in ended:
            if self._line.search(line):
                watching.step()
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

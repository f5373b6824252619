"""All that the hook holds of one rank, and what a program may ask of it.

`link` is the line to the agent (None outside a probe), `options` is what is wanted of this launch,
and `seen` is what was seen of the program. They are kept here alone: the other modules write
`state.link`, so that each sees what another one set. What a program asks (`configuration`) and
tells (`phase`) goes straight to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Line(Protocol):
    """What the other modules need of the line to the agent (`link.Link`)."""

    marks: Any
    steps: int

    def step_done(self) -> None: ...


link: Line | None = None
#: What the agent wants of this launch: see `workload.script.Start.options`.
options: dict[str, Any] = {}
#: What was seen of the program: how it is built, for `facts`.
seen: dict[str, Any] = {}


class NotAsAsked(ValueError):
    """The program does not train what the configuration says: another one would be measured."""


class _Asked(dict[str, Any]):
    """The configuration, which notes the knobs that the program reads."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def configuration() -> dict[str, Any]:
    """What this process is started under, by knob name; empty where nobody tunes.

    Every launch knob is there, its default included, and `gradient_accumulation`. A knob that the
    program reads here is one that it turns, so the search may offer it.
    """
    if "asked" not in seen:
        seen["asked"] = _Asked(options.get("configuration", {}))
    asked: dict[str, Any] = seen["asked"]
    return asked


def phase(name: str) -> None:
    """Mark that a part of the step (data, forward, backward, optimizer, ...) begins now.

    A name is one word, or a part and where it runs: `forward.encoder`. It costs some microseconds.
    A program that marks nothing has the calls of its DeepSpeed engine marked.
    """
    seen["marks_itself"] = True
    mark(name)


def mark(name: str) -> None:
    if link is not None and link.marks is not None:
        link.marks.add(name)


def mark_seen(name: str) -> None:
    """Mark what the engine is called for, unless the program marks its steps itself. A pipeline's
    engine calls itself, and not for all that it does."""
    if not seen.get("marks_itself") and not seen.get("pipeline"):
        mark(name)


_PRIVATE = ("asked", "optimizer", "engine", "inside_engine", "watched", "accelerates")


def facts() -> dict[str, Any]:
    """What the first step showed of how the program is built."""
    named = {k: v for k, v in seen.items() if k not in _PRIVATE}
    asked = seen.get("asked")
    return {**named, "reads": sorted(asked.read) if asked is not None else []}

"""State of the hook in one rank, and the functions that a program may call.

`link` is the connection to the agent (None outside a probe), `options` are the agent's for this
launch, `seen` what was observed. Other modules write `state.link`, so that each sees the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import source

#: Connection to the agent, a `link.Link` or `watch.Watch`; None without one.
link: Any = None
#: True in a probe, as a rank of the agent's or of a command that was started as it stands.
probed = False
#: Connection that a process makes when it steps (`attachment.Attachment`); None in other ranks.
attachment: Any = None
#: What the agent wants of this launch: see `tuner.workload.scripts.script_job.Start.options`.
options: dict[str, Any] = {}
#: What was seen of the program: how it is built, for `facts`.
seen: dict[str, Any] = {}


class NotAsRequested(ValueError):
    """Mismatch between the program's training and the configuration under test."""


class IndependentRanks(NotAsRequested):
    """Ranks that do not train one model together."""


class _ReadKnobs(dict[str, Any]):
    """Configuration that notes the knobs the program reads."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()
        self.own: dict[str, Any] = {}  # the program's values where nothing is set

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        if type(default) in (bool, int, float, str):
            self.own.setdefault(name, default)
        return super().get(name, default)


def configuration() -> dict[str, Any]:
    """Return this process's configuration, by knob name; empty outside tuning.

    Every launch knob is there, and `gradient_accumulation`; the search may offer what is read.
    """
    if "asked" not in seen:
        seen["asked"] = _ReadKnobs(options.get("configuration", {}))
    return seen["asked"]


def phase(name: str) -> None:
    """Mark that a part of the step (data, forward, backward, optimizer, ...) begins now.

    A name is one word, or a part and where it runs: `forward.encoder`.
    """
    seen["marks_itself"] = True
    mark(name)


def mark(name: str) -> None:
    """Mark the start of a phase, if there is an agent that keeps marks."""
    seen["phase"] = name
    if link is not None:
        link.mark(name)


def mark_seen(name: str) -> None:
    """Mark a call of the engine, unless the program, or the engine of a pipeline, marks itself."""
    if not seen.get("marks_itself") and not seen.get("pipeline"):
        mark(name)


_PRIVATE = (
    *("asked", "phase", "accelerates"),
    *("watched", "counted", "first_step", "ready"),
)


def facts() -> dict[str, Any]:
    """Return the facts about the program from its steps so far."""
    named = {k: v for k, v in seen.items() if k not in _PRIVATE}
    names = seen.get("asked")
    if (counts := seen.get("counted")) is not None:
        named |= {"groups": counts.groups, "first_batch": counts.first_batch}
        named |= {"samples": counts.samples, "batch_norm": counts.normalises}
        named |= {"named": source.batches(), "arguments": source.arguments()}
    if names is not None:
        named["own"] = names.own
    return {**named, "reads": sorted(names.read) if names is not None else []}

"""State of the hook in one rank, and the functions that a program may call.

`link` is the connection to the agent (None outside a probe), `options` are the agent's for this
launch, `seen` what was observed. Other modules write `state.link`, so that each sees the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import source

#: Connection to the agent, a `link.Link` or `online_marks.Watch`; None without one.
link: Any = None
#: True in a probe, as a rank of the agent's or of a command that was started as it stands.
probed = False
#: Connection that a process makes when it steps (`attachment.Attachment`); None in other ranks.
attachment: Any = None
#: What the agent wants of this launch: see `tuner.workload.scripts.command.Start.options`.
options: dict[str, Any] = {}
#: What was seen of the program: how it is built, for `facts`.
seen: dict[str, Any] = {}
#: Folders that were made for what a probe does not write.
made_folders: list[str] = []


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
        ends = bool(options.get("inspect")) and counts.over  # and not in what is measured
        named |= {"named": source.batches(running=ends), "arguments": source.arguments()}
    if names is not None:
        named["own"] = names.own
    return {**named, "reads": sorted(names.read) if names is not None else []}


# Live knobs of the running program: settings between steps, while every rank waits.
#
# The program registers a function for each knob of its own, and perhaps one that reads it. The
# agent names values at a boundary; each is set and read back before the next step.

_registered: dict[str, tuple[Callable[[Any], object], Callable[[], Any] | None]] = {}


def live(
    name: str, set_value: Callable[[Any], object], read: Callable[[], Any] | None = None
) -> None:
    """Register the function that sets a live knob between optimizer steps, on every rank, and its
    reader.

    Outside a probe it is called once, here, with the value that the run was started for.
    """
    _registered[name] = set_value, read
    chosen = options.get("live", {})
    if link is None and name in chosen:
        set_value(chosen[name])


def forget_live() -> None:
    """Forget the functions of an earlier program."""
    _registered.clear()


def present_values() -> dict[str, Any]:
    """Return each registered knob with its present value, None if it cannot be read."""
    return {name: read() if read else None for name, (_, read) in _registered.items()}


def set_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Set knobs; return {"read": the values read back} or {"refused": sentence}."""
    read_back: dict[str, Any] = {}
    for name, value in values.items():
        if name not in _registered:
            return {"refused": f"the script has not registered a live knob {name!r}"}
        set_value, read = _registered[name]
        try:
            set_value(value)
            if read is not None:
                read_back[name] = read()
        except Exception as error:
            message = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
            return {"refused": f"the script's function for {name} refused {value!r}: {message}"}
    return {"read": read_back}

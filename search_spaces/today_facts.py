"""Facts of a script's training today, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tuner.search_spaces.knobs import Value


@dataclass(frozen=True)
class TodayFacts:
    """Today's training of a script; 0, or None for its steps, if unknown.

    Attributes:
        sources: where a value comes from, a phrase, by its name.
    """

    ranks: int
    replicas: int
    global_batch: int
    micro_batch: int
    accumulation: int
    steps: int | None
    knobs: Mapping[str, Value]
    sources: Mapping[str, str]

    @property
    def lines(self) -> tuple[str, str, str]:
        batch = "global batch unknown (--global-batch N tells it)"
        if self.global_batch:
            micro, times = self.micro_batch or "?", self.accumulation or "?"
            batch = f"global batch {self.global_batch} = micro-batch {micro} x accumulation {times}"
            batch += f" x {self.replicas} replica{'s' * (self.replicas != 1)}"
        of = self._batch_sources
        length = "unknown, so energy and time are per optimizer step (--steps N gives the total)"
        if self.steps:
            length = f"{self.steps:,} optimizer steps{self._source('steps')}"
        knobs = ", ".join(
            f"{name}={value}{self._source(name)}"
            for name, value in self.knobs.items()
            if name not in ("data_parallel", "micro_batch")  # in the first line
        )
        plural = "s" * (self.ranks != 1)
        return (
            f"today: {self.ranks} rank{plural}{self._source('ranks')}, {batch}"
            + (f" ({of})" if of else ""),
            f"length: {length}",
            f"today's knobs: {knobs or 'all as by default'}",
        )

    def changed_lines(self, before: TodayFacts) -> tuple[str, ...]:
        """Return the lines that differ from earlier ones; a proof if it is all that was added."""
        proven = self._batch_sources != before._batch_sources
        if proven and replace(self, sources={}) == replace(before, sources={}):
            return (f"proven: {self._batch_sources}",)
        return tuple(line for line in self.lines if line not in before.lines)

    @property
    def _batch_sources(self) -> str:
        found: dict[str, list[str]] = {}
        for name in ("micro_batch", "accumulation"):
            if name in self.sources:
                found.setdefault(self.sources[name], []).append(name.replace("_", "-"))
        return "; ".join(f"{' and '.join(names)}: {source}" for source, names in found.items())

    def _source(self, name: str) -> str:
        return f" ({self.sources[name]})" if name in self.sources else ""

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON values, null for unknown ones."""
        unknown = ("global_batch", "micro_batch", "accumulation", "steps")
        data = {**vars(self), "knobs": dict(self.knobs), "sources": dict(self.sources)}
        return {n: None if n in unknown and not value else value for n, value in data.items()}

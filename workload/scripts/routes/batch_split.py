"""Route of the batch: which splits of it over ranks and micro-batches keep its size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knobs import Value
from tuner.workload.scripts.routes.base import ACCUMULATION, DEGREES, Draft, KnobSupport, Route
from tuner.workload.scripts.script_training import ScriptTraining

#: What would open both, of a loop of the script's own that steps after each backward pass.
_EDIT = "; a loop without accumulation needs four lines: docs/your-script.md#accumulation"
#: Reason against the knobs that split a batch of unknown size.
NO_BATCH = "the global batch is not known (--global-batch N tells it)"


@dataclass(frozen=True)
class BatchSplit(Route):
    """Split of the same global batch over ranks, micro-batches and accumulation.

    The other routes set its parts; this one says which splits keep the global batch.
    """

    carriers: Callable[[], Sequence[Route]]

    def today(self, job: ScriptTraining) -> Mapping[str, Value]:
        """Return the micro-batch that the inspection showed, and the ranks that are left for it."""
        found = today_by(self.carriers(), job)
        degrees: list[Any] = [found.get(name, 1) for name in DEGREES[:3]]
        return {
            "data_parallel": max(1, job.devices // math.prod(degrees)),
            **({"micro_batch": job.frame.micro_batch} if job.frame.micro_batch else {}),
        }

    def support(self, job: ScriptTraining, knob: str) -> KnobSupport | None:
        """Support a part of the split if another part keeps the global batch."""
        frame = job.frame
        if knob == "data_parallel" and not frame.ranks_stay:
            if frame.keeps == "micro_batch":
                return KnobSupport("the micro-batch keeps the global batch", route=self)
            if self.accumulates(job):
                return KnobSupport("the accumulation keeps the global batch", route=self)
        if knob != "micro_batch" or self._stays(job):
            return None
        if frame.keeps == "micro_batch" and not frame.ranks_stay:
            return KnobSupport("with the ranks, so that the global batch stays", route=self)
        return self._carrier(job, "micro_batch") if self.accumulates(job) else None

    def _stays(self, job: ScriptTraining) -> str:
        return "" if "micro_batch" in job.placeholders else job.frame.micro_batch_stays

    def why_not(self, job: ScriptTraining, knob: str) -> str:
        """Return which part of the split cannot follow."""
        frame = job.frame
        name = f"{{gradient_accumulation={frame.accumulation or 'N'}}}"
        would = f"(if an argument of the script sets it, write {name} in its place)"
        if knob == "data_parallel":
            by = frame.owner or "the script"
            return frame.ranks_stay or (
                f"on other ranks the global batch would change, for {by} keeps its accumulation "
                f"{would}"
                if job.global_batch
                else NO_BATCH
            )
        if self._stays(job):
            return frame.micro_batch_stays
        if self.sets_micro_batch(job):
            if not job.global_batch:
                return NO_BATCH
            edit = _EDIT if frame.accumulation == 1 and not frame.owner else ""
            return f"the accumulation does not follow it {would}{edit}"
        if frame.unproven:
            return (
                f"{frame.unproven} (if it sets the batch all the same, write "
                f"{{micro_batch={frame.micro_batch or 'N'}}} for its value)"
            )
        by = "the script" if frame.owner in ("", "accelerate", "lightning") else frame.owner
        return (
            f"no argument of {by} was found that sets its batch size (if one does, write "
            f"{{micro_batch={frame.micro_batch or 'N'}}} in its place)"
        )

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        """Have the hook compare the first batches of a probe with the configuration."""
        if draft.probe and draft.checks_batch:
            draft.options["micro_batch"] = configuration.micro_batch
        draft.options["counts"] = draft.probe and job.frame.counted

    def sets_micro_batch(self, job: ScriptTraining) -> bool:
        """Return True if the micro-batch of a script can be set."""
        return self._carrier(job, "micro_batch") is not None

    def accumulates(self, job: ScriptTraining) -> bool:
        """Return True if the accumulation can be chosen to keep the global batch."""
        if not job.global_batch:
            return False
        return job.frame.keeps == "accumulation" or self._carrier(job, ACCUMULATION) is not None

    def _carrier(self, job: ScriptTraining, knob: str) -> KnobSupport | None:
        found = (route.support(job, knob) for route in self.carriers())
        return next((support for support in found if support is not None), None)


def today_by(routes: Sequence[Route], job: ScriptTraining) -> dict[str, Value]:
    """Return the present values that some routes know; of several the first one's."""
    found: dict[str, Value] = {}
    for route in reversed(routes):
        found |= route.today(job)
    return found

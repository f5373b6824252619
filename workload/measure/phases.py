"""Time of a step by phase, from the marks of the training program.

A mark says which phase begins, and lasts until the next one. Names are a part of the step, or a
part and where in the model it runs: `data`, `forward`, `backward`, `optimizer`, `communication` (of
a pipeline), `forward.encoder`, ... Between windows the ranks stand at a `boundary`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

#: What the hook calls the wait for the agent at a window's boundary.
BOUNDARY = "boundary"
#: What it calls the time in which torch.compile traces and compiles (`tuner.workload.hook`).
COMPILATION = "compilation"

Mark = tuple[float, str]


def within(marks: Sequence[Mark], opened_s: float, closed_s: float) -> tuple[Mark, ...]:
    """Return a window's (time, phase) marks, from the phase that was current when it opened."""
    ordered = sorted(marks)
    before = [name for at_s, name in ordered if at_s <= opened_s]
    first = ((opened_s, before[-1]),) if before else ()
    return (*first, *((at_s, name) for at_s, name in ordered if opened_s < at_s <= closed_s))


def seconds_a_step(
    marks: Sequence[Mark], opened_s: float, closed_s: float, steps: int
) -> dict[str, float]:
    """Return the mean seconds per step in each phase of a window, longest first.

    The waits at boundaries are left out, so the values sum to a little less than the step time.
    """
    seconds: dict[str, float] = {}
    inside = within(marks, opened_s, closed_s)
    for (begins_s, name), (ends_s, _) in pairwise([*inside, (closed_s, BOUNDARY)]):
        if name != BOUNDARY:
            seconds[name] = seconds.get(name, 0.0) + (ends_s - begins_s) / steps
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def compilation_s(marks: Sequence[Mark], opened_s: float, closed_s: float) -> float:
    """Return the seconds of a span in which rank 0 compiled; 0.0 where nothing is marked."""
    return seconds_a_step(marks, opened_s, closed_s, 1).get(COMPILATION, 0.0)

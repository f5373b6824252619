"""Further launches of the choice and of the baseline, while they are worth their energy.

A phase of its own after the search: one probe at a time on the search's own executor, recorded in
the trace and the study like any probe, with the purpose "verify". Which of the two is launched next
and whether it is worth it say all windows so far (`tuner.results.judge`), so that a study that
continues after an interrupt needs no memory of its own.
"""

from __future__ import annotations

from tuner.problem.stop_reason import NoVerdict
from tuner.results.parts import Point
from tuner.study.loop import SearchLoop
from tuner.study.rules import further_launches

#: A launch that the node spoiled (no fault of the configuration) is made again so often.
SPOILED = 2


def verify(search: SearchLoop) -> NoVerdict | None:
    """Launch the choice and the baseline again until the choice is sure, or no launch is worth it.

    Returns:
        Why no more launches were made although they were worth it; None if they were not.
    """
    spoiled = 0
    told: Point | None = None
    while True:
        state = search.state
        choice, more = further_launches(state, search.expected_kJ)
        if more is None or choice is None or state.baseline is None:
            return None
        what, whose = (state.baseline, "today's") if more.of_baseline else (choice, "the choice")
        if not search.affords(what.configuration):
            return NoVerdict("limits_reached")
        if told is None or told.configuration != choice.configuration:
            told = choice
            count = f"{more.launches} launch{'es' * (more.launches != 1)}"
            search.note(
                f"{choice.configuration.short} and today's are launched again until the "
                f"choice is sure: about {count}"
            )
        record = search.probe_now(what.configuration, "verify", f"{whose} again")
        if record is None:
            return NoVerdict("limits_reached")
        if record.failure is not None and not record.failure.blames_configuration:
            spoiled += 1
            if spoiled > SPOILED:
                return NoVerdict("spoiled", message=record.failure.message)

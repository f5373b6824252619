"""A live setting of a probe in force: clocks by the governor, the rest by the program.

Every setting names the values of all declared live knobs, so that none is left over from the one
before it. A knob that refuses its value, or that reads back as another, costs its setting and not
the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.knob_declarations import Knob
from tuner.workload.node.clocks.base import AppliedSettings, Governor, SetByOthers, UnsupportedKnob
from tuner.workload.records.probe import UnappliedSetting


def apply_live(
    governor: Governor,
    set_live: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    knobs: Sequence[Knob],
    live: Settings,
    *,
    ranks: int,
) -> AppliedSettings | UnappliedSetting:
    """Put a live setting in force while the ranks wait at a boundary, and confirm it.

    Args:
        set_live: sets knobs by every rank's program, and returns what each answers.
    """
    own = {knob.name: knob for knob in knobs if knob.live and knob.name in live}
    rest = Settings({name: value for name, value in live.items() if name not in own})
    try:
        applied = governor.apply(rest, ranks=ranks)
    except UnsupportedKnob as error:
        return UnappliedSetting(live, str(error), unsupported=(error.knob,))
    except SetByOthers as error:
        return UnappliedSetting(live, str(error))
    if not own:
        return applied
    replies = set_live({name: knob.native(live[name]) for name, knob in own.items()})
    notes = list(applied.notes)
    for reply in replies:
        if "refused" in reply:
            return UnappliedSetting(live, str(reply["refused"]))
    for name, knob in own.items():
        read = [reply.get("read", {}).get(name) for reply in replies]
        if all(value is None for value in read):
            notes.append(f"{name} was set by the script, and nothing reads it back")
        for value in read:
            if value is not None and not knob.reads_as(value, live[name]):
                return UnappliedSetting(
                    live, f"{name} was set to {live[name]}, and reads {value!r}"
                )
    settings = Settings({**applied.settings, **{name: live[name] for name in own}})
    return AppliedSettings(settings, tuple(notes))

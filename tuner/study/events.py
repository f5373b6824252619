"""Events of a study while it is searched, and the receivers of these and of its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tuner.workload.records.probe import Announce, MeterInfo, ProbeRecord, ProbeRequest

if TYPE_CHECKING:
    from tuner.answer.answer import Answer
    from tuner.answer.parts import Point


@dataclass(frozen=True)
class Progress:
    """One event of a study.

    Attributes:
        meter: where the energy figures come from; None before the executor is ready.
        message: the sentence of a note, or why a probe was chosen.
        detail: whether a note is for those alone who ask for more.
        front: the measured front so far, fastest first.
        spent_kJ: energy of all probes so far, in the meter's scope.
        elapsed_s: seconds of the search so far, those of earlier sessions included.
        places: returns the nodes of the probes in flight, by probe; None if there is one node.
        phase: returns what the probe of this name does now, such as "warming up"; "" if unknown.
    """

    kind: Literal["note", "started", "finished"]
    meter: MeterInfo | None
    message: str = ""
    request: ProbeRequest | None = None
    record: ProbeRecord | None = None
    front: tuple[Point, ...] = ()
    spent_kJ: float = 0.0
    probe_budget_kJ: float | None = None
    probes: int = 0
    max_probes: int | None = None
    search_s: float | None = None
    elapsed_s: float = 0.0
    varying: tuple[str, ...] = ()
    places: Callable[[], Mapping[str, str]] | None = None
    phase: Callable[[str], str] | None = None
    detail: bool = False


Notify = Callable[[Progress], None]
#: Writer of files of an answer and its records, which returns the answer that names them.
WriteFiles = Callable[["Answer", Sequence[ProbeRecord]], "Answer"]


def announcing(notify: Notify | None) -> Announce:
    """Return the receiver of sentences that passes them on as notes of a study."""
    return lambda sentence: None if notify is None else notify(Progress("note", None, sentence))

"""How a search is run: what it may spend, when it stops, how long it measures.

With nothing said, a search makes at most `DEFAULT_PROBES` probes and starts none after
`DEFAULT_SEARCH_S` seconds, which on a machine without a GPU is a few minutes; as soon as the user
gives a limit of their own, theirs alone holds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from search_spaces.errors import InvalidValue
from workload.probe import WindowPolicy

__all__ = ["SamplerDesign", "SearchSettings", "check_positive"]

DEFAULT_PROBES = 20
DEFAULT_SEARCH_S = 300.0
#: With fewer probes than this none is kept for verifying the choice.
FEW_PROBES = 12


def check_positive(name: str, value: float | None) -> None:
    """Raise InvalidValue unless `value` is None or a finite number above zero."""
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= 1e300:
        raise InvalidValue(name, value, "a number greater than 0")


@dataclass(frozen=True)
class SamplerDesign:
    """The design choices of the sampler, each of which can be left out (docs/search.md).

    Attributes:
        max_live: live settings that one probe is told to visit at once at most; 1 is no sweep.
        start_launches: distinct launches measured before the surrogates choose; None lets the
            number of launches decide (1 to 6).
        start_live: live settings that each of them visits.
        cost_weight: exponent of the predicted joules in the score: 1 is improvement per joule.
        split_kernel: keep what a launch does and what a live setting does apart (`models.kernel`).
        own_level: give each launch a few per cent of its own (`models.kernel`).
        in_flight_share: launches in flight, as a share of those that are measured, beyond which a
            probe waits for results; infinite fills every slot.
        go_on: visit one live setting of a launch, and decide with what it measured whether to go on
            in it; else the whole sweep is chosen before the launch.
        learn_memory: learn from measured peaks and out-of-memory failures how far predicted memory
            is off (`models.memory_margin`).
    """

    max_live: int = 8
    start_launches: int | None = None
    start_live: int = 1
    cost_weight: float = 1.0
    split_kernel: bool = True
    own_level: bool = True
    go_on: bool = True
    in_flight_share: float = 0.4
    learn_memory: bool = True


@dataclass(frozen=True)
class SearchSettings:
    """What a search may spend and when it stops.

    Attributes:
        probe_budget_kJ: energy that all probes together may use; None is no limit.
        max_probes: probes, the baseline and the failed ones included; None is no limit.
        search_s: no probe starts after this many seconds, and none that is expected to end later.
        min_probes: launches before "nothing is worth its joules" may end the search.
        least_gain: where nobody says how long the training is (a recording), the search ends when
            the best probe is expected to add less than this share to the front's hypervolume; else
            when it does not repay its joules over the training.
        remeasure_share: share of every limit that is kept to measure the front again.
        verify: hold the choice against the baseline again before it is recommended
            (`tuner.verify`).
        verify_share: share of every limit that is kept for that.
        window: how long each live setting is measured.
        time_limit_s: a probe is killed after this; a shorter limit is set once some have ended.
        seed: of everything random.
    """

    probe_budget_kJ: float | None = None
    max_probes: int | None = None
    search_s: float | None = None
    min_probes: int = 8
    least_gain: float = 0.002
    remeasure_share: float = 0.15
    verify: bool = False
    verify_share: float = 1 / 3
    window: WindowPolicy = field(default_factory=WindowPolicy)
    time_limit_s: float = 300.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("probe_budget_kJ", "search_s", "time_limit_s"):
            check_positive(name, getattr(self, name))
        if self.max_probes is not None and (
            not isinstance(self.max_probes, int)
            or isinstance(self.max_probes, bool)
            or self.max_probes < 1
        ):
            raise InvalidValue("max_probes", self.max_probes, "an integer of at least 1")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise InvalidValue("seed", self.seed, "an integer of at least 0")

    def kept_share(self, purpose: str) -> float:
        """The share of every limit that is kept for probes of this purpose."""
        shares = {"remeasure": self.remeasure_share, "verify": self.verify_share * self.verify}
        return shares[purpose]

    def reserved_probes(self, purpose: str) -> int:
        """How many of `max_probes` are kept for probes of this purpose.

        Verifying takes whole pairs of launches: three where there is room, since two show a saving
        of 5 % only half of the time (`python -m benchmarks.verdicts`). With few probes in all it
        is left to what the search does not use.
        """
        if self.max_probes is None or self.max_probes < 3:
            return 0
        if purpose == "remeasure":
            return max(1, round(self.remeasure_share * self.max_probes))
        if not self.verify or self.max_probes < FEW_PROBES:
            return 0
        return 2 * min(3, max(2, round(self.verify_share * self.max_probes / 2)))

    def to_json(self) -> dict[str, Any]:
        return {
            **{f.name: getattr(self, f.name) for f in fields(self)},
            "window": asdict(self.window),
        }

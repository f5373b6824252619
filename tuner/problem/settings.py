"""Settings of a search (its limits, stop rule and length of measurements) and why one ended.

A search ends when what is left to find would not repay the next probe. Without any limit it also
uses at most `DEFAULT_SHARE` of the training's energy, once `LEAST_LAUNCHES` launch settings are
measured, and makes at most `DEFAULT_PROBES` probes. As soon as the user gives one limit, it alone
holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from tuner.formatting import Units, duration, label, percent, probability
from tuner.search_spaces.fields import Checked, option
from tuner.workload.records.probe import STAND_IN_W, WindowPolicy

DEFAULT_PROBES = 40
DEFAULT_SHARE = 0.01
#: Launch settings before which a share of the training's energy does not end a search.
LEAST_LAUNCHES = 8
#: Time that a search waits at most, in all its launches, for others to leave the machine.
QUIET_LIMIT_S = 1800.0
#: A probe of a simulated cluster may take as long as the steps of a large model (simulated
#: seconds).
SIMULATED_LIMIT_S = 3600.0


@dataclass(frozen=True)
class SearchSettings(Checked):
    """Limits and rules of a search."""

    probe_budget_kJ: float | None = option(
        None,
        "maximum energy of all probes of the search",
        unit="kJ",
        above=0,
        alias="probe-budget",
    )
    max_probes: int | None = option(
        None,
        "maximum number of probes, those of today's configuration and failed ones included "
        f"(default: {DEFAULT_PROBES} if the search has no other limit)",
        least=1,
    )
    search_s: float | None = option(
        None,
        "time limit of the search: start no probe that is expected to end later",
        unit="s",
        above=0,
        alias="search-time",
    )
    search_share: float | None = option(
        None,
        "maximum energy of the search as a share of today's training; it does not "
        f"end a search before {LEAST_LAUNCHES} launch settings are measured "
        f"(default: {100 * DEFAULT_SHARE:g}% if the search has no other limit)",
        unit="share",
        above=0,
        alias="search-share",
    )
    front_regret: float = option(
        0.01,
        "end the search once no configuration is likely (90 % sure) to be better than what was "
        "found by more than this (default: 1%), or earlier, if what is left to find would not "
        "repay the next probe",
        unit="share",
        least=0,
        alias="front-regret",
    )
    verify: bool = option(
        True, "launch the choice and today's configuration again until the choice is sure"
    )
    verify_share: float = option(
        1 / 4, "share of every limit that is reserved for verification", least=0, keyword_only=True
    )
    window: WindowPolicy = field(default_factory=WindowPolicy)
    time_limit_s: float | None = option(
        None,
        "kill a probe after this time (default: the limit of its first step and what its steps are "
        "predicted to take; shorter once some probes have ended)",
        unit="s",
        above=0,
        flag="probe-limit-s",
        alias="probe-limit",
    )
    first_step_limit_s: float | None = option(
        None,
        "treat a probe as hung if it makes no step within this time (default: 5min, three times "
        "what the inspection of the script took, or more if longer steps are predicted)",
        unit="s",
        above=0,
        alias="first-step-limit",
    )
    step_limit_s: float | None = option(
        None,
        "treat a probe as hung if a later step takes longer (default: 2min, or ten times what is "
        "predicted)",
        unit="s",
        above=0,
        alias="step-limit",
    )
    wait_until_quiet: bool = option(
        False,
        "before each launch, wait until other processes use less than a tenth of the cores, and no "
        f"GPU: {QUIET_LIMIT_S / 60:g} min at most in all, after which it is measured all the same",
    )
    seed: int = option(0, "random seed", least=0)

    def with_default_limits(self, *, simulated: bool = False) -> SearchSettings:
        """Return these settings with the default limits if they have none.

        Simulated probes use no energy, and may take longer.
        """
        settings = self
        if simulated:
            limit_s = max(self.time_limit_s or 0.0, SIMULATED_LIMIT_S)
            settings = replace(settings, time_limit_s=limit_s)
        if self.limits:
            return settings
        if simulated:
            return replace(settings, max_probes=DEFAULT_PROBES)
        return replace(settings, max_probes=DEFAULT_PROBES, search_share=DEFAULT_SHARE)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that were given, by name."""
        values = {
            "probe_budget_kJ": self.probe_budget_kJ,
            "max_probes": self.max_probes,
            "search_s": self.search_s,
            "search_share": self.search_share,
        }
        return {name: value for name, value in values.items() if value is not None}

    def window_of(self, purpose: str) -> WindowPolicy:
        """Return the window of probes of this purpose: rough, but of a baseline that is not
        launched again."""
        return self.window if purpose == "baseline" and not self.verify else self.window.rough

    @property
    def kept_share(self) -> float:
        """Share of every limit that is reserved for verification."""
        return self.verify_share * self.verify

    @property
    def reserved_probes(self) -> int:
        """Number of `max_probes` that are reserved for verification: two at least, if there are
        more than four in all."""
        if self.max_probes is None or not self.verify or self.max_probes < 5:
            return 0
        return max(2, round(self.verify_share * self.max_probes))

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {
            **{f.name: getattr(self, f.name) for f in fields(self)},
            "window": asdict(self.window),
        }


#: Expected gain of a probe below which its sentence names no figure.
HARDLY = 0.005
#: A search ends when the regret is larger than the user asked with a smaller probability than this.
STOP_PROBABILITY = 0.1
#: Kinds of a `StopReason` that are limits of the search.
LIMITS = ("max_probes", "probe_budget", "search_share", "time")
_UNITS = ("kJ", "s")
#: Kinds of searches that the same command continues as it is.
UNFINISHED = ("interrupted", "stopped", "running")
#: Kinds of searches that left nothing worth a probe: an answer says no reason.
COMPLETE = ("not_worth_it", "exhausted", "past_runs", "plan")


@dataclass(frozen=True)
class StopReason:
    """Reason why a search ended.

    Attributes:
        kind: one of `STOP_KINDS`.
        figures: numbers of the sentence, units in their names. A limit has `next_kJ`,
            `expected_gain` and `of_answer` of the next probe if the sampler estimates them.
    """

    kind: str
    figures: Mapping[str, float] = field(default_factory=dict)
    message: str = ""

    def of_time(self) -> StopReason:
        """Return the reason with its amounts of energy as the times that they stand for."""
        figures = {
            name.removesuffix("_kJ") + "_s" if name.endswith("_kJ") else name: (
                1000 * value / STAND_IN_W if name.endswith("_kJ") else value
            )
            for name, value in self.figures.items()
        }
        return replace(self, figures=figures)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are not empty."""
        values = {**vars(self), "figures": dict(self.figures)}
        return {name: value for name, value in values.items() if value}


@dataclass(frozen=True)
class NoVerdict:
    """Reason, one of `NO_VERDICTS`, why the choice was not launched again, or not often enough.

    `limit` is the kind of the `StopReason` by which no room was left.
    """

    kind: str
    message: str = ""
    limit: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are not empty."""
        return {name: value for name, value in vars(self).items() if value}


def energy_not_repaid(left_kJ: float, cost_kJ: float) -> StopReason | None:
    """Return the end of a job's search if all that is left to find is worth less than a probe."""
    if left_kJ >= cost_kJ:
        return None
    return StopReason("not_worth_it", {"needed_kJ": cost_kJ, "left_kJ": left_kJ})


def little_left(settings: SearchSettings, regret: Any, cost_kJ: float) -> StopReason | None:
    """Return the end of a search if it is unlikely that more is left to find than the user asked.

    `regret` is that of `tuner.search.joint_draws`.
    """
    above = regret.probability_above(settings.front_regret)
    if above >= STOP_PROBABILITY:
        return None
    figures = {
        "regret": settings.front_regret,
        "probability": above,
        "needed_kJ": cost_kJ,
        "of_answer": float(regret.of_answer),
    }
    return StopReason("not_worth_it", figures)


def _max_probes(figures: Mapping[str, float]) -> str:
    most = f"{figures['max_probes']:g}"
    if spare := int(figures["reserved"]):
        last = "the last" if spare == 1 else f"the last {spare}"
        are = "is" if spare == 1 else "are"
        return f"{last} of its {most} probes {are} kept to verify the choice"
    if figures["max_probes"] == 1:
        return "the only probe that it may make is made"
    return f"all {most} probes that it may make are made"


def _mark(figures: Mapping[str, float]) -> str:
    return "twin" if figures.get("twin") else "estimated" if figures["estimated"] else ""


def _probe_budget(figures: Mapping[str, float]) -> str:
    energy = Units.for_values([figures["probe_budget_kJ"]], []).energy_text
    left = (
        f"{energy(figures['left_kJ'])} of the probe budget of "
        f"{energy(figures['probe_budget_kJ'])} are left{label(_mark(figures))}"
    )
    reserved_kJ = figures.get("reserved_kJ", 0.0)
    if reserved_kJ > 0:
        left += f", of which {energy(reserved_kJ)} are kept to verify the choice"
    if not figures["needed_kJ"]:
        return left
    return f"another probe takes about {energy(figures['needed_kJ'])}, and {left}"


def _amounts(figures: Mapping[str, float], *names: str) -> Callable[[str], str]:
    """Return a formatter of energies, in the unit of those named, or of times."""
    stated_kJ = [figures[f"{name}_kJ"] for name in names if f"{name}_kJ" in figures]
    energy_text = Units.for_values(stated_kJ, []).energy_text

    def text(name: str) -> str:
        if f"{name}_s" in figures:
            return duration(figures[f"{name}_s"])
        return energy_text(figures[f"{name}_kJ"])

    return text


def _search_share(figures: Mapping[str, float]) -> str:
    amount = _amounts(figures, "job")
    return (
        f"it has used {amount('spent')}{label(_mark(figures))}, and "
        f"with the next probe it would use more than {percent(figures['share'])} of what the "
        f"training takes ({amount('job')})"
    )


def _not_worth_it(figures: Mapping[str, float]) -> str:
    amount = _amounts(figures, "needed", "left", "saved")
    trying = f"trying another configuration takes {amount('needed')}"
    if 0.0 in (
        figures.get(f"{quantity}_{unit}") for quantity in ("left", "saved") for unit in _UNITS
    ):
        return f"{trying} and would save nothing"
    if "probability" in figures:
        more = f"more than {100 * figures['regret']:g} % better" if figures["regret"] else "better"
        left = f"no point of the front is {more} than what was found"
        if figures.get("of_answer"):
            left = f"no other configuration is {more} than the best one found"
        return f"{left} ({probability(1 - figures['probability'])} sure); {trying}"
    if "left_kJ" in figures or "left_s" in figures:
        left = f"and all that is left to find would save {amount('left')}"
        return f"{trying}, {left} of the training"
    return f"{trying} and would save {amount('saved')} of the training"


def _brings(figures: Mapping[str, float]) -> str:
    gain, of_answer = figures["expected_gain"], figures.get("of_answer")
    if gain < HARDLY:
        return f"would hardly change the {'choice' if of_answer else 'front'}"
    if of_answer:
        return f"is expected to improve the choice by {percent(gain)}"
    return f"is expected to move the front by {percent(gain)}"


def _next_probe(figures: Mapping[str, float]) -> str:
    if figures.get("probe_budget_kJ") and figures["needed_kJ"]:  # which is told with the budget
        return f"; it {_brings(figures)}"
    return f"; another one takes {_amounts(figures, 'next')('next')} and {_brings(figures)}"


#: Ends of a search by their kind: the cause, made of its figures.
_CAUSES: dict[str, Callable[[Mapping[str, float]], str] | str] = {
    "max_probes": _max_probes,
    "probe_budget": _probe_budget,
    "search_share": _search_share,
    "time": "its {search_s:g} s are over",
    "not_worth_it": _not_worth_it,
    "exhausted": "no candidate is left to try",
    "unsafe": "every candidate was tried or would probably exceed the limit on peak power",
    "node_failures": "{failures:g} probes in a row failed because of the node: {message}",
}
#: The other kinds of a `StopReason`, each as a sentence.
_SENTENCES = {
    "interrupted": "It was interrupted.",
    "stopped": (
        "It was stopped by `tuner runs stop`; the same command with the same --name continues."
    ),
    "running": "The search has not ended.",
    "past_runs": "Nothing was probed: these are past runs.",
    "plan": "Nothing was probed: every configuration was predicted.",
}
STOP_KINDS = (*_CAUSES, *_SENTENCES)


def stop_sentence(reason: StopReason, *, brief: bool = False) -> str:
    """Return the reason why a search ended as a sentence, and unless `brief` the cost and gain of
    the next probe; KeyError if it lacks a figure.
    """
    if reason.kind in _SENTENCES:
        return _SENTENCES[reason.kind]
    cause, figures = _CAUSES[reason.kind], reason.figures
    if isinstance(cause, str):
        text = cause.format(**figures, message=reason.message)
    else:
        text = cause(figures)
    # That another probe would bring nothing is no second reason.
    has_next = "next_kJ" in figures or "next_s" in figures
    brings = not brief and has_next and figures["expected_gain"] >= HARDLY
    more = _next_probe(figures) if brings else ""
    return f"The search ended: {text}{more}."


#: Reasons of `NoVerdict` by their kind, each as a phrase.
NO_VERDICTS = {
    "not_requested": "verification was switched off (--no-verify)",
    "prediction": "every figure is predicted, so a second launch would only repeat the first",
    "recorded_trace": (
        "a recorded trace holds what was measured then, and nothing can be measured again"
    ),
    "no_spread": "the recorded table tells no spread, so measuring again would say the same",
    "stopped": "the search was stopped before",
    "limits_reached": "{limit} leaves no room for them",
    "spoiled": "launches were spoiled by the node: {message}",
    "too_short": "the training was over before it was measured again",
}


#: The limits of `Budget`, as what leaves no room.
_LIMITS = {
    "max_probes": "the number of probes that it may make",
    "probe_budget": "what is left of the probe budget",
    "search_share": "the share of the training's energy that a search may use",
    "time": "the time that the search may take",
}


def no_verdict_phrase(reason: NoVerdict) -> str:
    """Return the reason why the choice was not launched again as a phrase."""
    if reason.limit == "stopped":
        return NO_VERDICTS["stopped"]
    limit = _LIMITS.get(reason.limit, "a limit of the search")
    return NO_VERDICTS[reason.kind].format(message=reason.message, limit=limit)

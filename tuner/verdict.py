"""What the verifying probes of a trace say: does the choice hold against the baseline?

They come in pairs, one launch of the baseline (A) and one of the configuration that is tried (B),
in the order A B B A A B, so that a steady drift falls on both alike. Only these fresh launches are
compared (`tuner.compare`), not those of the search that made the configuration look good: the best
of many noisy points looks better than it is. How far launches differ is learnt from all that the
study repeated. The configuration survives where it shows itself better in what the search had found
better, and worse in none of that; where the baseline does not meet what was asked, so that it could
not be kept, not worse is enough. Everything is read from the trace, so that a study that goes on,
and a report that is written again, say the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from search_spaces.configuration import Configuration
from tuner.compare import Comparison, compare_launches
from tuner.decide import Constraints, decide, front_of
from tuner.result import Attempt, Choice, Point, Verification
from tuner.wording import change, knobs, label, number
from workload.probe import Measurement, ProbeRecord

__all__ = [
    "LEAST_PAIRS",
    "MOST_TRIES",
    "Settled",
    "attempts_of",
    "baseline_of",
    "may_stay",
    "settle",
]

#: Pairs of launches below which nothing is concluded.
LEAST_PAIRS = 2
#: So many configurations are tried; then the baseline is recommended.
MOST_TRIES = 3
#: Failures that say nothing of the configuration: the launch is made again.
NO_BLAME = ("cancelled", "node")


@dataclass(frozen=True)
class Settled:
    """The choice after what was verified.

    Attributes:
        best: what is recommended; None where nothing was measured.
        choice: how it was chosen.
        verification: whether it was held against the baseline; None where nothing was measured.
        to_try: what is to be held against the baseline next; None where there is nothing to try.
    """

    best: Point | None
    choice: Choice
    verification: Verification | None
    to_try: Configuration | None = None


def baseline_of(records: Sequence[ProbeRecord]) -> Configuration | None:
    """The baseline's configuration, where its probe measured something."""
    for record in records:
        if record.request.purpose == "baseline" and record.measurements:
            return record.request.configurations()[0]
    return None


def _verifying(records: Sequence[ProbeRecord]) -> list[tuple[Configuration, ProbeRecord]]:
    """The verifying launches that count, each with what was launched."""
    return [
        (record.request.configurations()[0], record)
        for record in records
        if record.request.purpose == "verify"
        and (record.failure is None or record.failure.kind not in NO_BLAME)
    ]


def tried_in_turn(
    records: Sequence[ProbeRecord], baseline: Configuration
) -> tuple[dict[Configuration, list[ProbeRecord]], list[ProbeRecord]]:
    """The verifying launches by the configuration that was tried, the baseline's included.

    A baseline's launch belongs to the configuration tried in the same pair, which the order tells.

    Returns:
        The launches by what was tried, and those of the baseline that have no partner yet.
    """
    groups: dict[Configuration, list[ProbeRecord]] = {}
    waiting: list[ProbeRecord] = []  # baseline launches whose partner has not come
    current: Configuration | None = None
    for configuration, record in _verifying(records):
        if configuration != baseline:
            current = configuration
            groups.setdefault(current, []).extend([*waiting, record])
            waiting = []
        elif current is not None and _lacks_baseline(groups[current], baseline):
            groups[current].append(record)
        else:
            waiting.append(record)
    return groups, waiting


def _lacks_baseline(group: Sequence[ProbeRecord], baseline: Configuration) -> bool:
    of_baseline = sum(record.request.configurations()[0] == baseline for record in group)
    return of_baseline < len(group) - of_baseline


def next_in_turn(group: Sequence[ProbeRecord], baseline: Configuration) -> bool:
    """Whether the next launch is the baseline's: A B B A A B ..."""
    of_baseline = sum(record.request.configurations()[0] == baseline for record in group)
    others = len(group) - of_baseline
    if of_baseline != others:
        return of_baseline < others
    # A whole number of pairs: every second pair begins with what is tried.
    return of_baseline % 2 == 0


def _windows(group: Sequence[ProbeRecord], configuration: Configuration) -> tuple[Measurement, ...]:
    """One window a launch: the first, so that launches are the repeats."""
    return tuple(
        record.measurements[0]
        for record in group
        if record.request.configurations()[0] == configuration and record.measurements
    )


def _promised(
    records: Sequence[ProbeRecord], baseline: Configuration, tried: Configuration
) -> tuple[float, float]:
    """(log step time, log energy) by which the search found it different from the baseline."""

    def means(of: Configuration) -> tuple[float, float]:
        windows = [
            m
            for record in records
            if record.request.purpose != "verify" and record.request.launch == of.launch
            for m in record.measurements
            if m.live == of.live
        ]
        if not windows:
            return math.nan, math.nan
        return (
            math.fsum(math.log(m.step_time_s) for m in windows) / len(windows),
            math.fsum(math.log(m.energy_per_step_J) for m in windows) / len(windows),
        )

    (a_time, a_energy), (b_time, b_energy) = means(baseline), means(tried)
    return b_time - a_time, b_energy - a_energy


def _repeats(
    records: Sequence[ProbeRecord],
    groups: Mapping[Configuration, Sequence[ProbeRecord]],
    baseline: Configuration,
    tried: Configuration,
) -> list[tuple[Measurement, ...]]:
    """What else was launched more than once: in the search, and in the attempts before this one.

    Attempts are kept apart from the search and from each other, so that a machine that changed
    between them is not taken for one whose launches differ. Later attempts do not count: a verdict
    stays what it was when it was told.
    """
    searched: dict[Configuration, list[Measurement]] = {}
    for record in records:
        if record.request.purpose != "verify":
            for window in record.measurements:
                configuration = Configuration(record.request.launch, window.live)
                searched.setdefault(configuration, []).append(window)
    found = [tuple(windows) for windows in searched.values()]
    for other, group in groups.items():
        if other == tried:
            break
        found += [_windows(group, baseline), _windows(group, other)]
    return [windows for windows in found if len(windows) > 1]


def may_stay(points: Sequence[Point], baseline: Configuration, constraints: Constraints) -> bool:
    """Whether the baseline meets what was asked, so that it could be kept."""
    today = [point for point in points if point.configuration == baseline]
    return bool(today) and decide(today, today, constraints)[1].met


def attempts_of(
    records: Sequence[ProbeRecord], baseline: Configuration, *, kept: bool = True
) -> tuple[Attempt, ...]:
    """What was tried and came to a verdict, in order.

    Args:
        records: the trace.
        baseline: what was launched in turn with each.
        kept: whether the baseline could be kept instead (`may_stay`). Where it could not, what was
            tried falls only when it failed or was shown to be worse.
    """
    attempts = []
    groups = tried_in_turn(records, baseline)[0]
    for tried, group in groups.items():
        failed = [r for r in group if r.request.configurations()[0] == tried and not r.measurements]
        a, b = _windows(group, baseline), _windows(group, tried)
        pairs = min(len(a), len(b))
        if failed:
            failure = failed[0].failure
            why = f"{failure.kind.replace('_', ' ')}: {failure.message}" if failure else "no window"
            reason = f"started again, it failed ({why})"
            sentence = f"{_name(tried)} did not survive: {reason}."
            attempts.append(Attempt(tried, pairs, None, None, False, reason, sentence))
        elif pairs >= LEAST_PAIRS:
            compared = compare_launches(
                a,
                b,
                names=(baseline.key, tried.key),
                meter=group[0].meter,
                repeats=_repeats(records, groups, baseline, tried),
            )
            promised = _promised(records, baseline, tried)
            attempts.append(_judged(tried, pairs, compared, promised, kept))
    return tuple(attempts)


def _name(configuration: Configuration) -> str:
    return " ".join(knobs(configuration)) or configuration.key


def _judged(
    tried: Configuration,
    pairs: int,
    compared: Comparison,
    promised: tuple[float, float],
    kept: bool,
) -> Attempt:
    """The verdict: see the module's first lines."""
    shown_better: list[str] = []
    shown_worse: list[str] = []
    wanted: list[str] = []
    for found, promise, word in (
        (compared.energy, promised[1], "less energy"),
        (compared.step_time, promised[0], "less time"),
    ):
        if promise < 0:
            wanted.append(word)
            if found.shown:
                (shown_better if found.relative < 0 else shown_worse).append(word)
    estimated = label(compared.meter.estimated)
    told = (
        f"against the baseline, {pairs} fresh launches of each in turn: "
        f"{compared.step_time.sentence}; {compared.energy.sentence}{estimated}."
    )
    survived = not wanted or ((bool(shown_better) or not kept) and not shown_worse)
    if not wanted:
        reason = "it promised to be no better than the baseline, and is kept for what was asked"
    elif shown_worse:
        reason = f"it promised {' and '.join(wanted)}, and shows no "
        reason += f"{' and no '.join(shown_worse)} but more"
    elif shown_better:
        reason = f"{' and '.join(shown_better)} shown"
    else:
        shown = "neither was shown" if len(wanted) > 1 else "it was not shown"
        reason = f"{' and '.join(wanted)} promised, and {shown}"
        reason += "" if kept else ", but the baseline does not meet what was asked"
    verdict = f"{'survived' if survived else 'did not survive'}: {reason}"
    return Attempt(
        tried,
        pairs,
        compared.step_time,
        compared.energy,
        survived,
        reason,
        f"{_name(tried)} {verdict}; {told}",
    )


def settle(
    points: Sequence[Point],
    records: Sequence[ProbeRecord],
    constraints: Constraints,
    *,
    off: str = "",
    unfinished: str = "",
    prefer: str = "",
) -> Settled:
    """Choose, in the light of what was verified.

    What was tried and did not survive is passed over. After `MOST_TRIES` of them, or where nothing
    else is left to try, the baseline is recommended if it meets what was asked, else the first
    that was tried: the sentence says so.

    Args:
        points: every measured point.
        records: the trace.
        constraints: what was asked.
        off: why nothing is verified; "" where it is.
        unfinished: why there is no verdict, where there is none.
        prefer: key of the configuration that this same question was settled on: it stays the choice
            unless it falls, although its fresh windows may make a neighbour that nobody verified
            look better by a hair.
    """
    front = front_of(points)
    best, choice = decide(points, front, constraints)
    if best is None:
        return Settled(None, choice, None)
    if off:
        return Settled(best, choice, Verification("off", f"Not verified: {off}."))
    baseline = baseline_of(records)
    if baseline is None:
        said = "Not verified: the baseline was not measured, so there is nothing to compare with."
        return Settled(best, choice, Verification("unfinished", said))
    kept = may_stay(points, baseline, constraints)
    attempts = attempts_of(records, baseline, kept=kept)
    made = [record for record in records if record.request.purpose == "verify"]
    drew_kJ = math.fsum(record.energy_J for record in made) / 1000

    def verified(status: str, sentence: str) -> Verification:
        return Verification(status, sentence, attempts, len(made), drew_kJ)  # type: ignore[arg-type]

    def settled(point: Point, chosen: Choice, status: str, sentence: str) -> Settled:
        return Settled(point, chosen, verified(status, sentence))

    survived = {attempt.configuration: attempt for attempt in attempts if attempt.survived}
    fallen = [attempt for attempt in attempts if not attempt.survived]
    lost = {attempt.configuration for attempt in fallen}
    left = [point for point in points if point.configuration not in lost]
    if fallen and left:
        best, choice = _passed_over(left, constraints, choice, best, lost)
    for point in points:
        if point.configuration.key == prefer != best.configuration.key:
            _, chosen = decide([point], [point], constraints)
            if point.configuration not in lost and chosen.met == choice.met:
                best, choice = point, chosen
    if best.configuration in survived:
        said = _confirmed(survived[best.configuration], label(best.meter.estimated))
        return settled(best, choice, "confirmed", said)
    if best.configuration == baseline:
        if fallen:
            return settled(best, _by_default(choice, best), "refuted", _refuted(attempts))
        said = "The choice is the baseline itself, so there is nothing to verify."
        return settled(best, choice, "baseline", said)
    if len(fallen) >= MOST_TRIES:
        first, first_choice = decide(points, front, constraints)
        assert first is not None
        if kept:
            today = next(p for p in points if p.configuration == baseline)
            _, chosen = decide([today], [today], constraints)
            return settled(today, _by_default(chosen, today), "refuted", _refuted(attempts))
        return settled(first, first_choice, "refuted", _refuted(attempts))
    why = unfinished or "the search ended before it could be measured again"
    said = f"The choice is not verified: {why}."
    return Settled(best, choice, verified("unfinished", said), best.configuration)


def _passed_over(
    left: Sequence[Point],
    constraints: Constraints,
    before: Choice,
    best: Point,
    fallen: set[Configuration],
) -> tuple[Point, Choice]:
    """The choice among what is left."""
    again, choice = decide(left, front_of(left), constraints)
    assert again is not None
    if best.configuration in fallen:
        count = len(fallen)
        said = f"{count} better-looking configuration{'s' * (count != 1)} did not survive being "
        said += "measured again. "
        choice = replace(choice, sentence=said + choice.sentence)
    return again, choice


def _by_default(choice: Choice, baseline: Point) -> Choice:
    energy = f"{number(baseline.energy_to_solution_kJ)} kJ{label(baseline.meter.estimated)}"
    return replace(
        choice,
        sentence=(
            f"Keep what you run today: {_name(baseline.configuration)} ({energy}, "
            f"{number(baseline.time_to_solution_s)} s). Nothing that was tried was shown to be "
            "better when it was measured again."
        ),
    )


def _confirmed(attempt: Attempt, estimated: str) -> str:
    told = []
    for found, word in ((attempt.energy, f"energy{estimated}"), (attempt.step_time, "time")):
        if found is not None and found.shown:
            told.append(change(1 + found.relative, 1.0, f"less {word}", f"more {word}"))
        else:
            told.append(f"no difference in {word} shown")
    return (
        f"Verified by {attempt.pairs} fresh launches each of the choice and of the baseline, in "
        f"turn: {' and '.join(told)}."
    )


def _refuted(attempts: Sequence[Attempt]) -> str:
    tried = f"{len(attempts)} configurations" if len(attempts) > 1 else "what was tried"
    return (
        f"Nothing survived: {tried} did not keep what the search had promised, when launched again "
        "in turn with the baseline."
    )

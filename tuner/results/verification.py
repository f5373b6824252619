"""Verification of the choice against the baseline, from the verifying probes of a trace.

They come in pairs, one launch of the baseline (A) and one of the configuration that is tried (B),
in the order A B B A A B, so that a steady drift affects both alike. Only these fresh launches are
compared (`tuner.results.significance`), not those of the search that made the configuration look
good: the best of many noisy points looks better than it is. The candidate survives if it is shown
to be better in what the search had found better, and worse in none of that; if the baseline does
not meet the constraints, so that it could not be kept, not worse is enough. In both cases its fresh
launches must also meet the limits more likely than not. Everything is read from the trace, so that
a continued study and a rewritten report give the same verdict.

Pairs are added until the verdict is clear. At most 5 % of the verifications of configurations that
are no better confirm one, over all candidates, both quantities and all looks
(`tuner.results.alpha_spending`). Each quantity that the search found better may spend an
equal part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tuner.formatting import Units, change, label, percent
from tuner.problem.constraints import Constraints
from tuner.problem.settings import MOST_PAIRS
from tuner.results.alpha_spending import LEAST_PAIRS, MOST_TRIES, look_level
from tuner.results.choice import decide, decide_likely, front_of
from tuner.results.limit_probability import LIKELY, SURE, Chance, Limits, of_launches, of_point
from tuner.results.parts import Attempt, Choice, Point, Status, Verification
from tuner.results.significance import Comparison, compare_launches
from tuner.search_spaces.configuration import Configuration
from tuner.workload.probe import Measurement, ProbeRecord

__all__ = [
    "VerifiedChoice",
    "ab_pairs",
    "attempts_of",
    "baseline_is_feasible",
    "baseline_of",
    "choose_verified",
]

#: After this number of pairs an attempt ends if it found less in nothing that was promised, and
#: "no worse" is concluded where that is enough.
FUTILE_PAIRS = 3


@dataclass(frozen=True)
class VerifiedChoice:
    """Choice after verification.

    Attributes:
        best: the choice; None if nothing was measured.
        choice: how it was chosen.
        verification: its verification; None if nothing was measured.
        to_try: the candidate to be verified next; None if there is none.
    """

    best: Point | None
    choice: Choice
    verification: Verification | None
    to_try: Configuration | None = None


def baseline_of(records: Sequence[ProbeRecord]) -> Configuration | None:
    """Return the baseline's configuration; None if its probe measured nothing."""
    for record in records:
        if record.request.purpose == "baseline" and record.measurements:
            return record.request.configurations()[0]
    return None


def _verifying(records: Sequence[ProbeRecord]) -> list[tuple[Configuration, ProbeRecord]]:
    """Return the verifying launches that count, each with its configuration."""
    return [
        (record.request.configurations()[0], record)
        for record in records
        if record.request.purpose == "verify"
        and (record.failure is None or record.failure.blames_configuration)
    ]


def ab_pairs(
    records: Sequence[ProbeRecord], baseline: Configuration
) -> tuple[dict[Configuration, list[ProbeRecord]], list[ProbeRecord]]:
    """Group the verifying launches by the candidate, the baseline's launches included.

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


def next_is_baseline(group: Sequence[ProbeRecord], baseline: Configuration) -> bool:
    """Return whether the next launch is the baseline's: A B B A A B ..."""
    of_baseline = sum(record.request.configurations()[0] == baseline for record in group)
    others = len(group) - of_baseline
    if of_baseline != others:
        return of_baseline < others
    # A whole number of pairs: every second pair begins with what is tried.
    return of_baseline % 2 == 0


def _windows(group: Sequence[ProbeRecord], configuration: Configuration) -> tuple[Measurement, ...]:
    """Return the first window of each launch, so that launches are the repeats."""
    return tuple(
        record.measurements[0]
        for record in group
        if record.request.configurations()[0] == configuration and record.measurements
    )


def _promised(
    records: Sequence[ProbeRecord], baseline: Configuration, tried: Configuration
) -> tuple[float, float]:
    """Return by which (log step time, log energy) it differed from the baseline in the search."""

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


def baseline_is_feasible(
    points: Sequence[Point], baseline: Configuration, constraints: Constraints
) -> bool:
    """Return whether the baseline meets the constraints, so that it could be kept."""
    today = [point for point in points if point.configuration == baseline]
    return bool(today) and decide(today, today, constraints)[1].met


def attempts_of(
    records: Sequence[ProbeRecord],
    baseline: Configuration,
    *,
    feasible: bool = True,
    planned: Sequence[int] = (),
    limits: Limits | None = None,
) -> tuple[Attempt, ...]:
    """Return the candidates that came to a verdict, in order.

    Args:
        records: the trace.
        baseline: the configuration that was launched in turn with each.
        feasible: whether the baseline could be kept instead (`baseline_is_feasible`). If not, a
            candidate is rejected only if it failed or was shown to be worse.
        planned: pairs that were planned for each candidate (`look_level`).
        limits: of the training job; None if there are none.
    """
    attempts: list[Attempt] = []
    groups = ab_pairs(records, baseline)[0]
    for rank, (tried, group) in enumerate(groups.items()):
        failed = [r for r in group if r.request.configurations()[0] == tried and not r.measurements]
        a, b = _windows(group, baseline), _windows(group, tried)
        pairs = min(len(a), len(b))
        if failed:
            failure = failed[0].failure
            why = f"{failure.kind.replace('_', ' ')}: {failure.message}" if failure else "no window"
            reason = f"started again, it failed ({why})"
            sentence = f"{tried.short} did not survive: {reason}."
            attempts.append(Attempt(tried, pairs, None, None, False, reason, sentence))
        elif pairs >= LEAST_PAIRS:
            promised = _promised(records, baseline, tried)
            quantities = max(1, sum(promise < 0 for promise in promised))
            compared = compare_launches(
                a[:pairs],
                b[:pairs],
                names=(baseline.short, tried.short),
                meter=group[0].meter,
                level=look_level(rank, pairs, planned) / quantities,
            )
            last = rank == len(groups) - 1
            asked = _Asked(
                feasible,
                limits.by_launches(tried, b[:pairs], a[:pairs]) if limits else None,
                limits is not None and limits.saves_gpus(tried, baseline),
            )
            attempts.append(_judged(tried, pairs, compared, promised, asked, last=last))
    return tuple(attempts)


@dataclass(frozen=True)
class _Asked:
    """What is asked of a candidate besides a saving.

    Attributes:
        feasible: whether the baseline meets the limits, so that it could be kept.
        p_met: probability that the candidate's fresh launches meet them; None without limits.
        saves_gpus: whether it is wanted for its smaller number of GPUs.
    """

    feasible: bool
    p_met: float | None
    saves_gpus: bool


def _judged(
    tried: Configuration,
    pairs: int,
    compared: Comparison,
    promised: tuple[float, float],
    asked: _Asked,
    *,
    last: bool,
) -> Attempt:
    """Return the verdict by the rule in the module's docstring.

    Args:
        last: whether no other candidate was tried after it.
    """
    shown_better: list[str] = []
    shown_worse: list[str] = []
    wanted: list[str] = []
    hope = False
    for found, promise, word in (
        (compared.energy, promised[1], "less energy"),
        (compared.step_time, promised[0], "less time"),
    ):
        if promise < 0:
            wanted.append(word)
            hope |= found.relative < 0
            if found.shown:
                (shown_better if found.relative < 0 else shown_worse).append(word)
    estimated = label(compared.meter.mark)
    figures = (
        f"against the baseline, {pairs} fresh launches of each in turn: "
        f"{compared.step_time.sentence}; {compared.energy.sentence}{estimated}."
    )
    feasible = asked.feasible
    p_met = 1.0 if asked.p_met is None else asked.p_met
    if wanted:
        survived = (bool(shown_better) or not feasible) and not shown_worse
    else:
        survived = not feasible or asked.saves_gpus
    undecided = last and bool(wanted) and not shown_better and not shown_worse
    undecided &= pairs < (MOST_PAIRS if feasible and hope else FUTILE_PAIRS)
    if survived and p_met < LIKELY and not undecided:
        # Two launches may miss a limit by chance.
        undecided = last and pairs < FUTILE_PAIRS and p_met > 1 - SURE
        survived = False
        reason = f"launched again, it meets the limits with a probability of {percent(p_met)}"
    elif not wanted:
        reason = "the search found no saving in it"
        reason += ", and it is kept for the constraints" if survived else ""
    elif shown_worse:
        reason = f"it promised {' and '.join(wanted)}, and shows no "
        reason += f"{' and no '.join(shown_worse)} but more"
    elif shown_better:
        reason = f"{' and '.join(shown_better)} shown"
    else:
        shown = "neither was shown" if len(wanted) > 1 else "it was not shown"
        reason = f"{' and '.join(wanted)} promised, and {shown}"
        reason += " yet" if undecided and feasible else ""
        reason += "" if feasible else ", but the baseline does not meet the constraints"
    survived &= not undecided
    verdict = "survived" if survived else "is undecided" if undecided else "did not survive"
    return Attempt(
        tried,
        pairs,
        compared.step_time,
        compared.energy,
        survived,
        reason,
        f"{tried.short} {verdict}: {reason}; {figures}",
        undecided,
    )


def choose_verified(
    points: Sequence[Point],
    records: Sequence[ProbeRecord],
    constraints: Constraints,
    *,
    off: str = "",
    unfinished: str = "",
    prefer: str = "",
    planned: Sequence[int] = (),
    steps: int = 1,
    chance: Chance = of_point,
) -> VerifiedChoice:
    """Choose among the points that verification did not reject.

    After `MOST_TRIES` rejected candidates, or if no other is left or can be verified, the choice is
    the baseline if it meets the constraints, else the first candidate.

    Args:
        points: every measured point.
        records: the trace.
        constraints: limits and objective of the training job.
        off: why nothing is verified; "" if it is.
        unfinished: why there is no verdict, if there is none.
        prefer: key of the configuration that was verified under the same constraints: it stays the
            choice unless it is rejected, although its new windows may make an unverified neighbour
            look marginally better.
        planned: pairs that were planned for each candidate (`look_level`).
        steps: that make the solution.
        chance: tells the probability that a point meets the limits which was not launched again.
    """
    units = Units.of(points)
    if off:
        best, choice = decide_likely(points, constraints, units, chance)
    else:
        chance = _by_launches(records, steps, chance)
        best, choice = decide(points, front_of(points), constraints, units, chance=chance)
    if best is None:
        return VerifiedChoice(None, choice, None)
    first = best, choice
    if off:
        return VerifiedChoice(best, choice, Verification("off", f"Not verified: {off}."))
    baseline = baseline_of(records)
    if baseline is None:
        why = "Not verified: the baseline was not measured, so there is nothing to compare with."
        return VerifiedChoice(best, choice, Verification("unfinished", why))
    feasible = baseline_is_feasible(points, baseline, constraints)
    limits = Limits(points, constraints, steps)
    attempts = attempts_of(records, baseline, feasible=feasible, planned=planned, limits=limits)
    rejected = {a.configuration for a in attempts if not (a.survived or a.undecided)}
    best, choice = _without(limits, rejected, best, choice, chance)
    for point in points:
        if point.configuration.key == prefer != best.configuration.key:
            _, chosen = decide([point], [point], constraints, units, chance=chance)
            if point.configuration not in rejected and chosen.met == choice.met:
                best, choice = point, chosen
    status: Status
    to_try = None
    survivors = [a for a in attempts if a.survived and a.configuration == best.configuration]
    if survivors:
        status, sentence = "confirmed", _confirmed(survivors[0], label(best.meter.mark))
    elif best.configuration == baseline and not rejected:
        status = "baseline"
        sentence = "The choice is the baseline itself, so there is nothing to verify."
    elif best.configuration == baseline or len(rejected) >= MOST_TRIES:
        status, sentence = "refuted", _refuted(attempts)
        if best.configuration != baseline and not feasible:
            best, choice = first
        else:
            best = next(point for point in points if point.configuration == baseline)
            choice = _by_default(decide([best], [best], constraints)[1], best, units)
    else:
        status, to_try = "unfinished", best.configuration
        why = unfinished or "the search ended before it could be measured again"
        sentence = f"The choice is not verified: {why}."
        if rejected and feasible and unfinished:
            # The next candidate was not shown to be better either: it is tried, not chosen.
            sentence = f"{to_try.short} is not verified: {why}."
            best = next(point for point in points if point.configuration == baseline)
            choice = _by_default(decide([best], [best], constraints)[1], best, units)
    made = [record for record in records if record.request.purpose == "verify"]
    energy_kJ = math.fsum(record.energy_J for record in made) / 1000
    verification = Verification(status, sentence, attempts, len(made), energy_kJ)
    return VerifiedChoice(best, choice, verification, to_try)


def _by_launches(records: Sequence[ProbeRecord], steps: int, chance: Chance) -> Chance:
    """Return the function that tells probabilities by fresh launches where there are any."""
    baseline = baseline_of(records)
    groups = ab_pairs(records, baseline)[0] if baseline is not None else {}

    def by_launches(point: Point, constraints: Constraints) -> tuple[dict[str, float], float]:
        group = groups.get(point.configuration, [])
        launches = _windows(group, point.configuration)
        others = _windows(group, baseline) if baseline is not None else ()
        if min(len(launches), len(others)) < LEAST_PAIRS:
            return chance(point, constraints)
        return of_launches(point, constraints, launches, others, steps)

    return by_launches


def _without(
    limits: Limits,
    rejected: set[Configuration],
    best: Point,
    choice: Choice,
    chance: Chance,
) -> tuple[Point, Choice]:
    """Return the choice among the points that were not rejected; the same if none is left."""
    points = limits.points
    left = [point for point in points if point.configuration not in rejected]
    if not rejected or not left:
        return best, choice
    units = Units.of(points)
    again, chosen = decide(left, front_of(left), limits.constraints, units, chance=chance)
    assert again is not None
    if best.configuration in rejected:
        count = len(rejected)
        text = f"{count} better-looking configuration{'s' * (count != 1)} did not survive being "
        chosen = replace(chosen, sentence=f"{text}measured again. {chosen.sentence}")
    return again, chosen


def _by_default(choice: Choice, baseline: Point, units: Units) -> Choice:
    energy = f"{units.energy_text(baseline.energy_to_solution_kJ)}{label(baseline.meter.mark)}"
    return replace(
        choice,
        sentence=(
            f"Keep what you run today: {baseline.configuration.short} ({energy}, "
            f"{units.time_text(baseline.time_to_solution_s)}). Nothing that was tried was shown to "
            "be better when it was measured again."
        ),
    )


def _confirmed(attempt: Attempt, estimated: str) -> str:
    found = []
    for part, word in ((attempt.energy, f"energy{estimated}"), (attempt.step_time, "time")):
        if part is not None and part.shown:
            found.append(change(1 + part.relative, 1.0, f"less {word}", f"more {word}"))
        else:
            found.append(f"no difference in {word} shown")
    return (
        f"Verified by {attempt.pairs} fresh launches each of the choice and of the baseline, in "
        f"turn: {' and '.join(found)}."
    )


def _refuted(attempts: Sequence[Attempt]) -> str:
    tried = f"{len(attempts)} configurations" if len(attempts) > 1 else "the candidate"
    return (
        f"Nothing survived: {tried} did not keep what the search had found, when launched again "
        "in turn with the baseline."
    )

"""Recommendation of a study: train with its choice, or keep the baseline.

The choice (`Result.best`) is the configuration that looks best under the constraints. It is
recommended only if something shows it to be better than the baseline: the launches of a
verification, or, if none was possible or wanted, the measurements of the search, whose saving must
then exclude zero. If the baseline does not meet the constraints and the choice probably does, the
choice is recommended in any case. Otherwise the recommendation is to keep the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from scipy.stats import norm

from tuner.formatting import Units, change, duration, energy_text, label, percent, settings_text
from tuner.problem.settings import LEAST_LAUNCHES
from tuner.problem.stop_reason import LIMITS
from tuner.results.choice import limits_phrase
from tuner.results.limit_probability import LIKELY, SURE
from tuner.results.parts import Attempt, Choice, Point, Verification
from tuner.results.significance import Difference
from tuner.workload.measure.statistics import log_error

if TYPE_CHECKING:
    from tuner.results.result import Result

__all__ = [
    "Basis",
    "Recommendation",
    "against_baseline",
    "difference_of_points",
    "fresh_launches",
    "recommend",
    "too_little_tried",
]

Basis = Literal[
    "verified",
    "measured",
    "predicted",
    "constraints",
    "no_baseline",
    "nothing_better",
    "not_shown",
    "not_enough",
]

#: Launch settings without which nothing is said about a space; a search of a short training ends by
#: itself after about so many.
LEAST_TRIED = 4
#: Upper end of an interval from which on no number is given: too few launches to tell.
MUCH_MORE = 2.0
#: Launches above which no number is given to prove a small saving.
MOST_LAUNCHES = 200


@dataclass(frozen=True)
class Recommendation:
    """Recommended action after a study.

    Attributes:
        action: "train" with `point`, or "keep" the baseline, which `point` is then.
        point: the configuration to run.
        basis: what it rests on. To train: "verified" (fresh launches showed the saving),
            "measured" (the search's measurements or the recorded table show it; no launch
            verified it), "predicted" (simulated probes show it), "constraints" (the baseline does
            not meet them), "no_baseline" (nothing to compare with). To keep: "nothing_better" (the
            choice is the baseline), "not_shown" (the choice was not shown to be better),
            "not_enough" (a limit of the search came before `LEAST_TRIED` launch settings).
        energy, time: difference from the baseline; None if unknown or if the baseline is kept.
        promising: the candidate that was not shown to be better; None if there is none.
        headline: what to do and what it brings, in one sentence.
        details: what is unproven and how to prove it, a sentence each.
    """

    action: Literal["train", "keep"]
    point: Point
    basis: Basis
    energy: Difference | None
    time: Difference | None
    promising: Point | None
    headline: str
    details: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the recommendation as JSON values; points by their configuration."""
        return {
            **vars(self),
            "point": self.point.configuration.to_json(),
            "energy": dict(vars(self.energy)) if self.energy else None,
            "time": dict(vars(self.time)) if self.time else None,
            "promising": self.promising.configuration.to_json() if self.promising else None,
            "details": list(self.details),
        }


def difference_of_points(quantity: str, a: Point, b: Point) -> Difference:
    """Return how `b` differs from `a` in "energy_per_step" or "step_time", by their 90 % intervals.

    The errors of the two points are taken as independent and normal in the logarithm.
    """
    if quantity == "step_time":
        values = a.time_to_solution_s, b.time_to_solution_s
        intervals = a.time_interval_s, b.time_interval_s
    else:
        values = a.energy_to_solution_kJ, b.energy_to_solution_kJ
        intervals = a.energy_interval_kJ, b.energy_interval_kJ
    return _difference(quantity, values, math.hypot(*map(log_error, intervals)))


def against_baseline(result: Result, point: Point) -> tuple[Difference, Difference] | None:
    """Return how a point differs from the baseline in energy and in time, everywhere the same.

    Fresh launches of both decide where there were any: the search's own measurements make what they
    chose look better than it is. None if the baseline was not measured, or is the point.
    """
    baseline = result.baseline
    if baseline is None or point.configuration == baseline.configuration:
        return None
    attempt = fresh_launches(result, point)
    if attempt is not None and attempt.energy is not None and attempt.step_time is not None:
        return attempt.energy, attempt.step_time
    return _difference_in(result, "energy_per_step", point), _difference_in(
        result, "step_time", point
    )


def fresh_launches(result: Result, point: Point) -> Attempt | None:
    """Return the attempt that compared launches of a point and of the baseline; None without."""
    attempts = result.verification.attempts if result.verification is not None else ()
    compared = (each for each in attempts if each.energy is not None and each.step_time is not None)
    return next((each for each in compared if each.configuration == point.configuration), None)


def _difference_in(result: Result, quantity: str, point: Point) -> Difference:
    """Return how a point differs from the baseline, which was measured or predicted.

    The predictions of a plan err together, so their errors are those of the ratio.
    """
    baseline = result.baseline
    assert baseline is not None
    together = result.plan.ratio_sd if result.plan is not None else None
    if together is None or point.configuration not in together:
        return difference_of_points(quantity, baseline, point)
    time_sd, energy_sd = together[point.configuration]
    if quantity == "step_time":
        values = baseline.time_to_solution_s, point.time_to_solution_s
        return _difference(quantity, values, time_sd)
    both = baseline.energy_to_solution_kJ, point.energy_to_solution_kJ
    return _difference(quantity, both, energy_sd)


def _difference(quantity: str, values: tuple[float, float], error: float) -> Difference:
    """Return the difference of two values whose log ratio has this standard error."""
    log = math.log(values[1] / values[0])
    reach = float(norm.ppf(0.975)) * error
    p_value = 0.0 if log else 1.0
    if error > 0:
        p_value = float(2 * norm.sf(abs(log) / error))
    return Difference(
        quantity,
        math.expm1(log),
        math.expm1(log - reach),
        math.expm1(log + reach),
        p_value,
        "intervals of the measured points",
    )


def _cheaper(choice: Choice, energy: Difference, time: Difference) -> bool:
    """Return whether the price of the choice is shown to be below the baseline's.

    The price is a sum of a term in energy and one in time, so its relative error is at most the
    larger of theirs.
    """
    if choice.objective != "least-cost" or not (choice.objective_value and choice.baseline_value):
        return False
    error = max(
        (math.log1p(each.high) - math.log1p(each.low)) / (2 * norm.ppf(0.975))
        for each in (energy, time)
    )
    cost = _difference("cost", (choice.baseline_value, choice.objective_value), error)
    return cost.shown and cost.relative < 0


def _saves(differences: Sequence[Difference | None]) -> bool:
    return any(each is not None and each.shown and each.relative < 0 for each in differences)


def _changes(energy: Difference, time: Difference, estimated: str) -> str:
    """ "82 % less energy and 12 % more time than today; no difference in ... shown"."""
    shown, unclear, risks = [], [], []
    saved = max(-min(each.relative * each.shown for each in (energy, time)), 0.0)
    for found, word in ((energy, f"energy{estimated}"), (time, "time")):
        if found.shown:
            shown.append((found.relative, word))
        else:
            unclear.append(word)
            if saved and found.high > saved:
                risks.append(_risk(found, word))
    shown.sort(key=lambda each: each[0])  # the saving first
    words = [change(1 + share, 1.0, f"less {word}", f"more {word}") for share, word in shown]
    mixed = len(shown) == 2 and shown[0][0] < 0 < shown[1][0]
    text = f"{(' but ' if mixed else ' and ').join(words)} than today" if words else ""
    if unclear:
        text += ("; " if text else "") + f"no difference in {' or '.join(unclear)} shown"
    return ", but ".join([text, *risks])


def _risk(found: Difference, word: str) -> str:
    """Return how much more it may be, where that is more than the saving beside it."""
    if found.high >= MUCH_MORE:
        return f"how much more {word} it may take is not known"
    return f"it may take up to {percent(found.high)} more {word}"


def _p_text(differences: Sequence[Difference]) -> str:
    """Return the largest p-value of the savings shown."""
    p = max(each.p_value for each in differences if each.shown and each.relative < 0)
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def recommend(result: Result) -> Recommendation | None:
    """Return what to do after a study; None if nothing was measured."""
    best, baseline, choice = result.best, result.baseline, result.choice
    if best is None:
        return None
    limits = limits_phrase(result.constraints, Units.of(result.points or (best,)))
    if baseline is None:
        return _without_baseline(result, best, limits)
    verification = result.verification
    if best.configuration == baseline.configuration:
        return _keep(result, baseline, _promising(result, verification), limits)
    differences = against_baseline(result, best)
    assert differences is not None
    energy, time = differences
    attempt = fresh_launches(result, best)
    attempt = attempt if attempt is not None and attempt.survived else None
    simulated = best.meter.name == "simulated"
    # No launches could decide, or those of a simulated cluster would only repeat its prediction.
    free = simulated or verification is None or verification.status == "off"
    better = attempt is not None and _saves((energy, time))
    better |= free and _saves((energy, time))
    if attempt is not None or free:
        better |= _cheaper(choice, energy, time)
    rescued = _rescued(choice)
    if not better and not rescued:
        return _keep(result, baseline, best, limits)
    basis: Basis = "verified" if attempt is not None else "predicted" if simulated else "measured"
    basis = basis if better else "constraints"
    text = f"Train with {settings_text(best.configuration, baseline.configuration)}: "
    text += _changes(energy, time, label(best.meter.mark))
    evidence = "predicted, not measured" if simulated else "not verified"
    sure = choice.p_all_met is None or choice.p_all_met >= SURE
    if attempt is not None and (better or sure):
        evidence = "verified"
    elif attempt is not None:
        evidence = f"{attempt.pairs} fresh launches of each"
    if attempt is not None and _saves((energy, time)):
        evidence += f", {_p_text((energy, time))}"
    text += f" ({evidence})"
    if rescued:
        text += f"; {_meets(choice, limits)}"
    elif not choice.met:
        text += f"; nothing measured trains {limits}, and this comes nearest"
    details = () if basis == "verified" else _caveats(result, basis)
    return Recommendation("train", best, basis, energy, time, None, f"{text}.", details)


def _rescued(choice: Choice) -> bool:
    """Return whether the choice probably meets the limits, and the baseline does not."""
    likely = choice.p_all_met is None or choice.p_all_met >= LIKELY
    return choice.met and choice.baseline_met is False and likely


def _meets(choice: Choice, limits: str) -> str:
    """Return "it trains within 1,170 s, and what you run today does not", as sure as it is."""
    p, today = choice.p_all_met, choice.baseline_p_met
    if p is None or p >= SURE:
        text = f"it trains {limits}"
    else:
        text = f"it trains {limits} with a probability of {percent(p)}"
    sure = today is None or today <= 1 - SURE
    return f"{text}, and what you run today {'does' if sure else 'probably does'} not"


def _caveats(result: Result, basis: Basis) -> tuple[str, ...]:
    """Return what a recommendation that no launch verified rests on."""
    if basis == "predicted":
        return (
            "Every figure is predicted by the analytic models. To prove the saving, run "
            "`tuner optimize` on the machine itself.",
        )
    if basis == "measured":
        return (
            "The saving rests on the measurements that also made the choice, and the best of many "
            "noisy measurements looks better than it is. `tuner optimize` on the machine itself "
            "verifies it by fresh launches of both.",
        )
    return ()


def _without_baseline(result: Result, best: Point, limits: str) -> Recommendation:
    text = f"Train with {settings_text(best.configuration)}: "
    if result.choice.met:
        text += f"the best of {len(result.points)} measured configurations"
    else:
        text += f"nothing measured trains {limits}, and this comes nearest"
    text += ". What you run today was not measured, so no saving is known."
    return Recommendation("train", best, "no_baseline", None, None, None, text)


def _promising(result: Result, verification: Verification | None) -> Point | None:
    """Return the first candidate that verification neither confirmed nor showed to be worse."""
    for attempt in verification.attempts if verification is not None else ():
        if attempt.energy is None or attempt.step_time is None or attempt.survived:
            continue
        worse = [d for d in (attempt.energy, attempt.step_time) if d.shown and d.relative > 0]
        points = [p for p in result.points if p.configuration == attempt.configuration]
        if points and not worse:
            return points[0]
    return None


def _keep(result: Result, baseline: Point, promising: Point | None, limits: str) -> Recommendation:
    """Recommend the baseline, with the candidate that was not shown to be better beside it."""
    found = "predicted" if baseline.meter.name == "simulated" else "measured"
    if len({point.configuration for point in result.points}) == 1:
        text = f"Keep what you run today: nothing else was {found}"
    elif result.choice.met and result.choice.baseline_met is False:
        text = (
            f"Keep what you run today, although it does not train {limits}: nothing {found} was "
            "shown to do so"
        )
    elif result.choice.met:
        text = f"Keep what you run today: nothing {found} was shown to be better"
    else:
        text = (
            f"Keep what you run today: nothing {found} trains {limits}, and nothing was shown to "
            "be better"
        )
    basis: Basis = "nothing_better" if promising is None else "not_shown"
    if too_little_tried(result):
        return _not_enough(result, baseline, promising)
    details = () if promising is None else _unproven(result, baseline, promising)
    return Recommendation("keep", baseline, basis, None, None, promising, f"{text}.", details)


def too_little_tried(result: Result) -> bool:
    """Return True if a limit ended the search before it can say anything about its space.

    That takes `LEAST_TRIED` launch settings, or all there are.
    """
    if result.stop is None or result.stop.kind not in LIMITS:
        return False
    tried = {point.configuration.launch for point in result.points}
    every = int(result.about.get("candidates", 0))
    return len(tried) < LEAST_TRIED and len(result.points) < every


def _not_enough(result: Result, baseline: Point, promising: Point | None) -> Recommendation:
    """Recommend the baseline for want of anything else, with the limits that would tell more."""
    simulated = baseline.meter.name == "simulated"
    text = (
        f"Not enough was tried to say anything: {len(result.points)} of "
        f"{int(result.about['candidates']):,} configurations."
    )
    spent, stop = result.spent, result.stop
    details: tuple[str, ...] = ()
    if spent.probes and stop is not None:
        each_kJ, each_s = spent.energy_kJ / spent.probes, spent.time_s / spent.probes
        count = max(2 * LEAST_LAUNCHES, 2 * spent.probes)
        limit = {
            "max_probes": f"--max-probes {count}",
            "probe_budget": f"--probe-budget {_round_up(count * each_kJ):g}kJ",
            "time": f"--search-time {_round_up(count * each_s):g}s",
        }.get(stop.kind, "")
        details = (
            f"A probe takes about {energy_text(each_kJ)}{label(baseline.meter.mark)} and "
            f"{duration(each_s)} {'there' if simulated else 'here'}; allow about {count} of them: "
            f"the same command with --name {result.name} {limit} continues from here.",
        )
    return Recommendation("keep", baseline, "not_enough", None, None, promising, text, details)


def _round_up(value: float) -> float:
    """Return a value rounded up to two significant digits."""
    scale = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / scale) * scale


def _unproven(result: Result, baseline: Point, promising: Point) -> tuple[str, ...]:
    """Return the sentences about a candidate that was not shown to be better, and its proof."""
    differences = against_baseline(result, promising)
    assert differences is not None
    energy, time = differences
    attempt = fresh_launches(result, promising)
    estimated = label(promising.meter.mark)
    parts = [
        f"{100 * found.relative:+.1f} % {word} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
        for found, word in ((energy, f"energy{estimated}"), (time, "time"))
    ]
    settings = settings_text(promising.configuration, baseline.configuration)
    first = f"Promising but unproven: {settings} ({', '.join(parts)}; 95 % intervals)."
    if result.verification is not None and result.verification.status == "unfinished":
        return (first,)  # the verification's own sentence tells how to finish it
    if attempt is not None:
        return first, _proof(attempt, min((energy, time), key=lambda each: each.p_value))
    if promising.meter.name == "simulated":
        return first, "To prove it, run `tuner optimize` on the machine itself."
    return first, "To prove it, measure both again in turn: `tuner optimize` does so by default."


def _proof(attempt: Attempt, found: Difference) -> str:
    """Return about how many launches would show the difference, if it is what it seems to be.

    The half-width of an interval shrinks with the square root of the number of launches.
    """
    half = (found.high - found.low) / 2
    launches = attempt.pairs * (half / found.relative) ** 2 if found.relative else math.inf
    if not launches <= MOST_LAUNCHES:
        return f"More than {MOST_LAUNCHES} launches of each would be needed to prove it."
    count = max(math.ceil(launches), attempt.pairs + 1)
    return f"To prove it would take about {count} launches of each in turn ({attempt.pairs} made)."

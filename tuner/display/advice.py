"""Sentences of a recommendation: the change, its gain and its certainty."""

from __future__ import annotations

from tuner.answer.answer import Answer
from tuner.answer.choice import BOTH
from tuner.answer.judge import PROBABLY, WORTH, evidence_of
from tuner.answer.parts import Difference, Evidence, Point, Recommendation, Shrunk
from tuner.formatting import (
    Units,
    change,
    duration,
    label,
    percent,
    probability,
    settings_text,
    whole_percent,
)
from tuner.problem.settings import UNFINISHED, no_verdict_phrase
from tuner.search_spaces.configuration import Configuration

PREDICTION = (
    "Every figure is predicted by the analytic models; `tuner optimize` on the machine itself "
    "measures."
)


def headline(result: Answer) -> str:
    """Return the recommendation and its certainty as a sentence; "" if nothing was measured."""
    advice = result.recommendation
    if advice is None:
        return ""
    if advice.action == "train":
        return _train(result, advice)
    return _keep(result, advice)


def _limits(result: Answer) -> str:
    shown = [*result.points, *([result.best] if result.best else [])]
    return result.limits.phrase(Units.of(shown))


def _train(result: Answer, advice: Recommendation) -> str:
    point, baseline = advice.point, result.baseline
    found = point.source
    if baseline is None:
        text = f"Train with {settings_text(point.configuration)}: "
        if result.choice.met:
            text += f"the best of {len(result.points)} {found} configurations"
        else:
            text += f"nothing {found} trains {_limits(result)}, and this comes nearest"
        return f"{text}. What you run today was not measured, so no saving is known."
    text = f"Train with {settings_text(point.configuration, baseline.configuration)}: "
    text += _changes(advice, point)
    if advice.evidence is Evidence.PREDICTED:
        text += " (predicted, not measured)"
    elif not advice.for_limits and advice.p_better is not None:
        text += f" ({probability(advice.p_better)} sure)"
    if advice.for_limits:
        text += f"; it trains {_limits(result)}"
        if result.plan is None or not result.plan.doubts:
            text += f" with a probability of {probability(result.choice.p_all_met or 0.0)}"
        text += ", and what you run today does not"
    elif baseline.configuration not in {each.configuration for each in result.points}:
        text += "; what you run today probably does not fit in memory"
    elif not result.choice.met:
        text += f"; nothing {found} trains {_limits(result)}, and this comes nearest"
    return f"{text}."


def _changes(advice: Recommendation, point: Point) -> str:
    """ "82 % less energy and 12 % more time than today; no difference in ... shown"."""
    if advice.energy is None or advice.time is None:
        return "as today"
    shown, unclear = [], []
    for found, word in _shown_figures((advice.energy, advice.time), point):
        if found.named:
            shown.append((found.relative, word))
        else:
            unclear.append(word)
    shown.sort(key=lambda each: each[0])  # the saving first
    words = [change(1 + share, 1.0, f"less {word}", f"more {word}") for share, word in shown]
    mixed = len(shown) == 2 and shown[0][0] < 0 < shown[1][0]
    text = f"{(' but ' if mixed else ' and ').join(words)} than today" if words else ""
    if unclear:
        text += ("; " if text else "") + f"no difference in {' or '.join(unclear)} shown"
    return text


def _shown_figures(
    energy_and_time: tuple[Difference, Difference], point: Point
) -> list[tuple[Difference, str]]:
    """Return the differences that a point's meter supports, each with its word."""
    energy, time = energy_and_time
    words = ((energy, point.meter.shown(f"energy{label(point.meter.mark)}")), (time, "time"))
    return [(difference, word) for difference, word in words if word]


def _keep(result: Answer, advice: Recommendation) -> str:
    count = len({point.configuration for point in result.points}) - 1
    found = advice.point.source
    if count < 1:
        return f"Keep what you run today: nothing else was {found}."
    untold = result.disturbed is not None and not result.saving_known
    if result.too_little_tried and advice.promising is None and not untold:
        tried = f"{len(result.points)} of {int(result.about.get('candidates', 0)):,}"
        return f"Keep what you run today: only {tried} configurations were tried."
    if advice.promising is not None:
        if not result.saving_known:
            load = _load(result)
            name = settings_text(advice.promising.configuration, result.today_configuration)
            return (
                f"Keep what you run today for now: {load}, so no saving is known; {name} looked "
                f"best (probability {probability(advice.p_better or 0.0)}): {_WHEN_QUIET}."
            )
        text = _expected(result, advice.promising, advice.p_better or 0.0)
        after = f", but {busy}" if (busy := _busy(result)) else _more_text(advice)
        return f"Keep what you run today for now: {text}{after}."
    if not result.choice.met:
        return f"Keep what you run today: nothing {found} meets the limits."
    if not result.saving_known:
        others = f"{count} others" if count > 1 else "other"
        after = f", as {busy}" if (busy := _busy(result)) else ""
        return (
            "Keep what you run today for now: the measurements are too uncertain to tell it from "
            f"the {others}{after}."
        )
    among = f"among {count} other{'s' * (count != 1)}"
    if result.choice.baseline_met is False:
        among += f", although today does not train {_limits(result)}"
    after = f", but {busy}" if (busy := _busy(result)) else ""
    return f"Keep what you run today: {_nothing(result)} was found {among}{after}."


#: What to do about a busy machine.
_WHEN_QUIET = "measure again when it is quiet (--wait-until-quiet)"


def _busy(result: Answer) -> str:
    # "other processes used 63 % of the cores: measure again when it is quiet (...)", or "".
    return f"{load}: {_WHEN_QUIET}" if (load := _load(result)) else ""


def _load(result: Answer) -> str:
    # "other processes used 63 % of the cores", or "".
    if (load := result.disturbed) is None:
        return ""
    cores = f"other processes used {percent(load.share)} of the cores"
    return " and ".join(filter(None, [cores * load.on_cores, load.device]))


def _nothing(result: Answer) -> str:
    assert result.best is not None
    if result.judged.rival(result.best) is not None:
        return "no difference worth a change"
    both = result.choice.rule == BOTH
    return "nothing better in both energy and time" if both else "nothing better"


def _expected(result: Answer, point: Point, p: float) -> str:
    # "mb16 probably saves 10 % energy (80 % sure)". A prediction less probable than that is within
    # the error of the models, and says so.
    name = settings_text(point.configuration, result.today_configuration)
    saves, judge = _saving(result, point), result.judged
    if result.plan is not None and result.plan.doubts:
        verb = f"is predicted to save{saves}" if saves else "is predicted to be better"
        return f"{name} {verb}, with the doubt above"
    if p >= PROBABLY:
        verb = f"probably saves{saves}" if saves else "is probably better"
        return f"{name} {verb} ({probability(p)} sure)"
    if evidence_of(judge, point) is Evidence.PREDICTED:
        verb = f"is predicted to save{saves}" if saves else "is predicted to be better"
        return f"{name} {verb}, which is within the models' error (probability {probability(p)})"
    verb = f"may save{saves}" if saves else "may be better"
    return f"{name} {verb} (probability {probability(p)})"


def _saving(result: Answer, point: Point) -> str:
    # " 10 % energy and 9 % time" by which a point is below the baseline. Without per cent where the
    # verdict counts others: what is not sure promises no figure that chance has made.
    found = result.judged.differences(point)
    if found is None:
        return ""
    by_chance = result.judged.shrunk(point) is not None
    saved = [
        word if by_chance else f"{whole_percent(-each.relative)} {word}"
        for each, word in _shown_figures(found, point)
        if each.relative <= -WORTH
    ]
    return f" {' and '.join(saved)}" if saved else ""


def _more_text(advice: Recommendation) -> str:
    # ": 2 more launches, about 35 s, would tell"; "" if none are worth it.
    if advice.more is None:
        return ""
    count = advice.more.launches
    text = f": {count} more launch{'es' * (count != 1)}"
    if advice.launch_s:
        text += f", about {duration(count * advice.launch_s)},"
    return f"{text} would tell"


def _against_today(result: Answer) -> Recommendation | None:
    # The recommendation, if there is a baseline that it is compared with.
    return result.recommendation if result.compared else None


def findings(result: Answer) -> list[str]:
    """Return alternatives to the recommendation: a better candidate, a trade."""
    advice = _against_today(result)
    if advice is None:
        return []
    lines = []
    if advice.action == "train" and advice.promising is not None:
        text = _expected(result, advice.promising, result.judged.p_better(advice.promising))
        lines.append(f"{text}{_more_text(advice)}.")
    if advice.trade is not None and result.saving_known:
        lines.append(_trade(result, advice.trade))
    return lines


def noise_lines(result: Answer) -> list[str]:
    """Return the sentences of an answer whose verdict does not count figures as the table shows
    them, or whose change was measured beside other work; empty for any other."""
    advice = result.recommendation
    if advice is None or not result.saving_known:
        return []
    shrunk = result.judged.shrunk(advice.promising or advice.point)
    units = Units.of([*result.points, *result.compared])
    lines = [noise_sentence(shrunk, units, result.today_configuration)] if shrunk else []
    if advice.action == "train" and result.compared and (load := _load(result)):
        # To keep what runs today, the headline names it.
        lines.append(f"Measured while {load}; it may save more or less without: {_WHEN_QUIET}.")
    return lines


def noise_sentence(shrunk: Shrunk, units: Units, today: Configuration | None) -> str:
    """Return what is left of a measured difference once chance is allowed for.

    Without a baseline, which figure counts instead of a measured one.
    """
    point, counts = shrunk.point, shrunk.point.inferred
    if shrunk.ratios is not None:
        energy, time = shrunk.ratios
        saved = point.meter.shown(change(energy, 1, "less energy", "more energy"))
        left = " and ".join(filter(None, [saved, change(time, 1, "less time", "more time")]))
        return f"Allowing for chance in few or noisy windows, expect {left} than today."
    name = "today" if point.configuration == today else settings_text(point.configuration, today)
    if shrunk.of_energy:
        figures = point.energy_to_solution_kJ, counts.energy_to_solution_kJ
        measured, counted = map(units.energy_text, figures)
    else:
        figures = point.time_to_solution_s, counts.time_to_solution_s
        measured, counted = map(units.time_text, figures)
    return (
        f"The verdict counts {counted} for {name}, whose windows show {measured}: noisy figures "
        "are drawn towards each other, lest the luckiest wins."
    )


def prediction_lines(result: Answer) -> list[str]:
    """Return the sentence of an answer that rests on no measurement; empty for any other."""
    advice = _against_today(result)
    predicted = advice is not None and advice.evidence is Evidence.PREDICTED
    return [PREDICTION] if predicted else []


def continuation(result: Answer) -> str:
    """Return a phrase with the command that continues a search worth more launches, or ""."""
    advice = _against_today(result)
    if advice is None:
        return ""
    too_little = advice.action == "keep" and result.too_little_tried and result.spent.probes
    if advice.more is None and not too_little:
        return ""
    again = f"the same command with --name {result.name}"
    if result.stop is None or result.stop.kind not in UNFINISHED:
        again += " and higher limits"
    return again


def details(result: Answer) -> tuple[str, ...]:
    """Return additions to the recommendation: a trade, a better candidate, more launches."""
    lines = [*findings(result), *noise_lines(result), *prediction_lines(result)]
    if again := continuation(result):
        advice = result.recommendation
        brings = "makes them" if advice and advice.more else "continues from here"
        lines.append(f"{again[0].upper()}{again[1:]} {brings}.")
    return tuple(lines)


def _trade(result: Answer, trade: Point) -> str:
    # A point that saves one of energy and time for more of the other.
    advice, baseline = result.recommendation, result.judged.today_point
    assert advice is not None
    energy = trade.energy_to_solution_kJ / baseline.energy_to_solution_kJ
    time = trade.time_to_solution_s / baseline.time_to_solution_s
    name = settings_text(trade.configuration, baseline.configuration)
    words = [
        (energy, change(energy, 1.0, "less energy", "more energy")),
        (time, change(time, 1.0, "less time", "more time")),
    ]
    words.sort(key=lambda each: each[0])
    joined = " for " if words[0][0] < 1 < words[1][0] else " and "
    text = joined.join(word for _, word in words)
    option = f" (--minimize {advice.trade_objective})" if advice.trade_objective else ""
    return f"A trade: {name} takes {text} than today{option}."


def advice_lines(result: Answer) -> list[str]:
    """Return the recommendation and its unproven parts; nothing if nothing was measured."""
    return [headline(result), *details(result)] if result.recommendation is not None else []


def evidence_sentence(result: Answer) -> str:
    """Return how many launches the recommendation rests on, and why there are no more."""
    advice, baseline = result.recommendation, result.baseline
    if advice is None or baseline is None or advice.evidence is Evidence.PREDICTED:
        return ""
    if not result.judged.launches_of(baseline) or not result.spent.energy_kJ:
        return ""  # past runs in a CSV file
    point = advice.promising or advice.point
    if advice.action == "train":
        point = advice.point
    launches, of_today = (result.judged.launches_of(each) for each in (point, baseline))
    verifying = len(launches & result.judged.verifying)
    text = f"Rests on {_count(len(launches))} of it"
    text += f", {verifying} of them after it was chosen," if verifying else ""
    text += f" and {len(of_today)} of today"
    if point.configuration == baseline.configuration:
        text = f"Rests on {_count(len(launches))} of today"
    ended = result.verification.ended if result.verification is not None else None
    return f"{text}; no more were made: {no_verdict_phrase(ended)}." if ended else f"{text}."


def _count(launches: int) -> str:
    return f"{launches} launch{'es' * (launches != 1)}"

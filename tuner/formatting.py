"""Formatting of figures and knobs for people: units, digits, percentages, "estimated" and "twin".

One study's figures share one unit of energy and one of time, chosen by their size, so that a table
can be read down and a plot compared with a table. Every energy or power that was not metered is
followed by the mark of its meter, "estimated" or "twin" (`label`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tuner.search_spaces import knobs
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knobs import (
    KNOBS,
    Value,
    in_order,
    short_name,
    short_word,
    word_knob,
)

#: Name, kilojoules in one, and the kilojoules from which the next is taken: from one kilowatt-hour
#: on, the unit in which energy is bought.
_ENERGY_UNITS = (
    ("J", 1e-3, 0.1),
    ("kJ", 1.0, 3600.0),
    ("kWh", 3600.0, 3.6e7),
    ("MWh", 3.6e6, 3.6e10),
    ("GWh", 3.6e9, math.inf),
)
_TIME_UNITS = (
    ("s", 1.0, 600.0),
    ("min", 60.0, 3600.0),
    ("h", 3600.0, 100 * 3600.0),
    ("days", 86400.0, math.inf),
)
#: Significant digits of figures at most, however close two of them are.
MOST_DIGITS = 5


class HasMark(Protocol):
    """Anything with the mark of a meter."""

    @property
    def mark(self) -> str:
        """The word beside its figures; empty if they were metered."""


class HasCosts(Protocol):
    """Anything with an energy and a time to solution."""

    @property
    def energy_to_solution_kJ(self) -> float:
        """Energy to solution, kilojoules."""

    @property
    def time_to_solution_s(self) -> float:
        """Time to solution, seconds."""


@dataclass(frozen=True)
class Units:
    """The units in which one set of figures is written; `kJ` and `s` are their sizes.

    `digits` is the number of significant digits of points that are compared (`telling`).
    """

    energy: str = "kJ"
    kJ: float = 1.0
    time: str = "s"
    s: float = 1.0
    digits: int = 3

    @classmethod
    def for_values(cls, energies_kJ: Iterable[float], times_s: Iterable[float]) -> Units:
        """Choose the units by the value in the middle, so that one far value among many does not
        decide; of two the larger counts."""

        def pick(
            table: Sequence[tuple[str, float, float]], values: Iterable[float]
        ) -> tuple[str, float, float]:
            sizes = sorted({abs(value) for value in values if value and math.isfinite(value)})
            middle = sizes[len(sizes) // 2] if sizes else 1.0
            return next(row for row in table if middle < row[2])

        energy, kJ, _ = pick(_ENERGY_UNITS, energies_kJ)
        time, s, _ = pick(_TIME_UNITS, times_s)
        return cls(energy, kJ, time, s)

    @classmethod
    def of(cls, points: Iterable[HasCosts]) -> Units:
        every = list(points)
        units = cls.for_values(
            (p.energy_to_solution_kJ for p in every), (p.time_to_solution_s for p in every)
        )
        if not any(getattr(point, "of_step", False) for point in every):
            return units
        return replace(units, energy=f"{units.energy}/step", time=f"{units.time}/step")

    def telling(self, pairs: Iterable[tuple[HasCosts, HasCosts]]) -> Units:
        """Return these units with as many digits as it takes for a reader who divides two figures
        to find the percentage that is shown beside them.

        Args:
            pairs: points that are compared, the earlier one first.
        """
        divided = [
            both
            for before, after in pairs
            for both in zip(self.place(after), self.place(before), strict=True)
        ]
        for digits in range(self.digits, MOST_DIGITS):
            if all(_tells(now, was, digits) for now, was in divided):
                return replace(self, digits=digits)
        return replace(self, digits=MOST_DIGITS)

    def place(self, point: HasCosts) -> tuple[float, float]:
        """Return a point's time and energy in these units: where it is drawn."""
        return point.time_to_solution_s / self.s, point.energy_to_solution_kJ / self.kJ

    def energy_text(self, energy_kJ: float, digits: int = 3) -> str:
        return f"{number(energy_kJ / self.kJ, digits)} {self.energy}"

    def time_text(self, time_s: float, digits: int = 3) -> str:
        return f"{number(time_s / self.s, digits)} {self.time}"

    def interval_text(self, interval: tuple[float, float], per: float) -> str:
        """Return "9.1 to 9.6", both ends divided by `per`; "" if an end is not finite."""
        low, high = interval
        if not (math.isfinite(low) and math.isfinite(high)):
            return ""
        return f"{number(low / per)} to {number(high / per)}"


def number(value: float, digits: int = 3) -> str:
    """Return three significant digits or more, thousands separated: "1,234", "12.3", "0.0123"."""
    if not math.isfinite(value):
        return "unknown"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 9)}f}"


def _tells(now: float, was: float, digits: int) -> bool:
    # The figures as they are written have the ratio, in whole per cent, that is written; nobody
    # checks the last digit of one above two.
    if not (now and was and math.isfinite(now) and math.isfinite(was)):
        return True
    shown, divided = (float(number(value, digits).replace(",", "")) for value in (now, was))
    if not divided or signed_percent(shown / divided - 1) == signed_percent(now / was - 1):
        return True
    return now / was >= 2 and abs(shown / divided - now / was) < 0.01 * now / was


def percent(share: float) -> str:
    """Return a share in per cent, with one decimal below ten: "12 %", "3.4 %"."""
    value = 100 * share
    if value == 0:
        return "0 %"
    if 0 < value < 0.05:
        return "under 0.1 %"
    return f"{value:.1f} %" if abs(value) < 9.95 else f"{value:,.0f} %"


def whole_percent(share: float) -> str:
    """Return a share in whole per cent, "3 %"."""
    return signed_percent(share).lstrip("+")


def probability(p: float) -> str:
    """Return a probability in per cent, which is rounded neither to certainty nor to the 95 % that
    a recommendation takes."""
    if p >= 0.9995:
        return "more than 99.9 %"
    if p < 0.01:
        return "less than 1 %"
    return f"{100 * p:.1f} %" if p >= 0.985 else f"{int(100 * p + 1e-9)} %"


def common_mark(meters: Iterable[HasMark]) -> str:
    """Return the mark of figures from these meters: "twin" before "estimated" before ""."""
    return max((meter.mark for meter in meters), default="")


def label(mark: str) -> str:
    """Return the mark of a meter to follow an energy or a power, e.g. " (estimated)", or ""."""
    return f" ({mark})" if mark else ""


def after_comma(mark: str) -> str:
    """Return the mark of a meter to follow a unit, e.g. ", estimated", or ""."""
    return f", {mark}" if mark else ""


def change(now: float, before: float, less: str, more: str) -> str:
    """Return a change like "23 % less energy", from the words for a fall and for a rise.

    In whole per cent, as in the tables beside it.
    """
    share = now / before - 1 if before else math.nan
    if not math.isfinite(share):
        return f"an unknown change: {less}"
    text = whole_percent(abs(share))
    if text == "0 %":
        noun = less.removeprefix("less ")
        return f"the same {noun}" if noun != less else "no difference"
    return f"{text} {less if share < 0 else more}"


def duration(time_s: float) -> str:
    """Return a time in its usual unit: "45 s", "31 min", "3.4 h"."""
    if time_s < 120:
        return f"{time_s:.0f} s"
    return f"{time_s / 60:.0f} min" if time_s < 7200 else f"{time_s / 3600:.1f} h"


def energy_text(energy_kJ: float) -> str:
    """Return an energy in the unit of its own size, where no other figure stands beside it."""
    return Units.for_values([energy_kJ], []).energy_text(energy_kJ)


def knob_text(name: str, value: Value | None) -> str:
    """ "micro_batch=4"; a knob left alone reads "clock_MHz=device's own"."""
    return f"{name}={value_text(value)}"


def value_text(value: Value | None) -> str:
    """Return the value of a knob."""
    return "device's own" if value is None else knobs.value_text(value)


def long_text(configuration: Configuration) -> str:
    """Return every knob that a configuration sets as NAME=VALUE, in order."""
    names = ordered_knobs([configuration])
    return " ".join(knob_text(name, configuration.get(name)) for name in names) or "default"


def ordered_knobs(configurations: Iterable[Configuration]) -> tuple[str, ...]:
    """Return every knob set by any of them: standard ones first, in order, then by name."""
    return in_order(name for c in configurations for half in (c.launch, c.live) for name in half)


def varying_knobs(configurations: Iterable[Configuration]) -> tuple[str, ...]:
    """Return the knobs with more than one value, in the order of `ordered_knobs`."""
    every = list(configurations)
    return tuple(name for name in ordered_knobs(every) if len({c.get(name) for c in every}) > 1)


def short(
    configuration: Configuration,
    names: Iterable[str] | None = None,
    *,
    baseline: Configuration | None = None,
) -> str:
    """Return a configuration's short name: "mb16 zero1 1050MHz dp8".

    Args:
        names: the knobs to name; all that it sets if not given, or empty. If every one has its
            default, they are named all the same.
        baseline: what differs from it comes first, also where the configuration has a default.
    """
    only = tuple(names or ())
    names = only or ordered_knobs([configuration])
    values = {name: configuration.get(name) for name in names}
    first = differing_knobs(configuration, baseline)
    if not first:
        text = short_name(values, names)
        return (
            " ".join(short_word(n, values[n]) for n in only) if text == "default" and only else text
        )
    words = [short_word(name, configuration.get(name)) for name in first]
    rest = short_name(values, [name for name in names if name not in first])
    return " ".join([*words, *([rest] if rest != "default" else [])]) or "default"


def differing_knobs(
    configuration: Configuration, baseline: Configuration | None
) -> tuple[str, ...]:
    """Return the knobs in which a configuration differs from a baseline, in order; none without
    one."""
    if baseline is None:
        return ()
    names = ordered_knobs([configuration, baseline])
    return tuple(name for name in names if configuration.get(name) != baseline.get(name))


def settings_text(configuration: Configuration, baseline: Configuration | None = None) -> str:
    """Return "mb16 zero1 1050MHz": the differences from the baseline; all knobs without any."""
    names = differing_knobs(configuration, baseline)
    words = [short_word(name, configuration.get(name)) for name in names]
    return " ".join(words) or short(configuration)


def settings_legend(shown: Iterable[str]) -> str:
    """Return a legend of short names, each knob once with its first value; "" if there are none.

    Args:
        shown: settings as texts, such as "mb16 zero1 1050MHz", or sentences with such words.
    """
    found: dict[str, str] = {}
    for word in (each.strip("(),;:.") for each in " ".join(shown).split()):
        if (knob_word := word_knob(word)) is not None and knob_word[0] not in found:
            found[knob_word[0]] = _in_words(word, *knob_word)
    return ", ".join(found[name] for name in in_order(found))


def _in_words(word: str, name: str, value: Value | None) -> str:
    text = f"{word} = {KNOBS[name].words}"
    if value is None:
        return f"{text} left to the device"
    has_unit = KNOBS[name].affixes[1]
    return text if has_unit else f"{text} {value_text(value)}"


def counted(count: int, word: str) -> str:
    """Return a number with its word, "1 node" or "2,048 nodes"."""
    return f"{count:,} {word}{'s' * (count != 1)}"


def signed_percent(share: float, digits: int = 0) -> str:
    """Return a change in per cent with its sign, "+14 %"; without one where it rounds to zero."""
    text = f"{100 * share:+,.{digits}f}"
    return f"{text if text.strip('+-0.') else text[1:]} %"


def right_aligned(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Return rows as lines: columns aligned to the right, the last one to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        indent
        + "  ".join([*(c.rjust(w) for c, w in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]

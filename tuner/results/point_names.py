"""Names of measured points: "best", "knee", a number of the front, or the knobs in any spelling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.formatting import ordered_knobs, varying_knobs
from tuner.pareto import knee
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.short_names import in_order, parse_words, short_name

if TYPE_CHECKING:
    from tuner.results.result import Point, Result

__all__ = ["find_point"]


def find_point(result: Result, name: str | Configuration) -> Point:
    """Return a measured point by name (`Result.point`).

    Raises:
        UnknownName: there is none.
        InputError: knobs that name several points.
    """
    named = {
        "recommended": result.recommended,
        "best": result.best,
        "baseline": result.baseline,
    }
    if result.front_points:
        both = [(p.energy_to_solution_kJ, p.time_to_solution_s) for p in result.front_points]
        named["knee"] = result.front_points[knee(both)]
    named |= {str(number): p for number, p in enumerate(result.front_points, start=1)}
    if isinstance(name, Configuration):
        found = [point for point in result.points if point.configuration == name]
    elif (direct := named.get(name)) is not None:
        return direct
    else:
        found = _by_knobs(result.points, name)
    if found:
        return found[0]
    known = [word for word, p in named.items() if p is not None and not word.isdigit()]
    known += [f"1 to {len(result.front_points)}"] if result.front_points else []
    raise UnknownName(
        "measured point",
        name.short if isinstance(name, Configuration) else name,
        [*known, f"or a configuration that was measured (tuner front {result.name})"],
    )


def _by_knobs(points: Sequence[Point], text: str) -> list[Point]:
    """Return the point that a text of knobs names, alone; empty if there is none.

    A knob that the text leaves out has its default, or else is the same in every point.

    Raises:
        InputError: the text leaves out a knob that would be needed to tell points apart.
    """
    try:
        words = parse_words(text, standard=False)
    except InputError:
        return []
    if not words:
        return []
    configurations = [point.configuration for point in points]
    varying = set(varying_knobs(configurations))
    named = {*ordered_knobs(configurations), *KNOBS}
    if any(knob not in named for knob in words):
        return []
    agree = [p for p in points if all(_same(p.configuration.get(n), v) for n, v in words.items())]
    left_out = [knob for knob in varying if knob not in words]
    plain = [p for p in agree if all(_is_default(p.configuration, n) for n in left_out)]
    if plain or not agree:
        return plain
    rest = [short_name({n: p.configuration.get(n) for n in left_out}) for p in agree]
    shown = "; ".join(list(dict.fromkeys(rest))[:4])
    raise InputError(
        f"{text!r} leaves open {' and '.join(in_order(left_out))}, in which the measured points "
        f"differ; add one of: {shown}"
    )


def _is_default(configuration: Configuration, knob: str) -> bool:
    value = configuration.get(knob)
    return value is None or (knob in KNOBS and value == KNOBS[knob].default)


def _same(value: Any, told: Any) -> bool:
    """Compare a knob's value with what was typed, which is text for a recorded table's own knob."""
    if isinstance(told, str) and not isinstance(value, str):
        parts = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return parts == told
    return bool(value == told)

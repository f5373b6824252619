"""Configurations by name: the knobs that distinguish one of a list from the others, in any
spelling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.formatting import ordered_knobs, varying_knobs
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knob_declarations import CHANGED
from tuner.search_spaces.knobs import KNOBS, in_order, parse_words, short_name, value_text

if TYPE_CHECKING:
    from tuner.search_spaces.space import Candidates


def named_configurations(
    configurations: Sequence[Configuration], text: str, subject: str
) -> list[Configuration]:
    """Return the configuration that a text of knobs names, alone; empty if there is none.

    A knob that the text leaves out has its default, or else is the same in all.

    Raises:
        InputError: the text leaves out a knob that would be needed to tell them apart.
    """
    try:
        words = parse_words(text, standard=False)
    except InputError:
        return []
    if not words:
        return []
    varying = set(varying_knobs(configurations)) - {CHANGED}
    named = {*ordered_knobs(configurations), *KNOBS}
    if any(knob not in named for knob in words):
        return []
    agree = [c for c in configurations if all(same_value(c.get(n), v) for n, v in words.items())]
    left_out = [knob for knob in varying if knob not in words]
    plain = [c for c in agree if all(_is_default(c, n) for n in left_out)]
    if plain or not agree:
        return plain
    rest = [short_name({n: c.get(n) for n in left_out}) for c in agree]
    shown = "; ".join(list(dict.fromkeys(rest))[:4])
    raise InputError(
        f"{text!r} leaves open {' and '.join(in_order(left_out))}, in which the {subject} "
        f"differ; add one of: {shown}"
    )


def _is_default(configuration: Configuration, knob: str) -> bool:
    value = configuration.get(knob)
    return value is None or (knob in KNOBS and value == KNOBS[knob].default)


def same_value(value: Any, typed: Any) -> bool:
    """Compare a knob's value with typed text, which is text for a recorded table's own knob."""
    if isinstance(typed, str) and not isinstance(value, str):
        return value_text(value) == typed
    return bool(value == typed) or (typed is None and value == "auto")


def first_tries(
    candidates: Candidates, given: Sequence[str | Configuration]
) -> tuple[Configuration, ...]:
    """Return the candidates that these configurations or names mean; InputError otherwise."""
    return tuple(_candidate(candidates.configurations, each) for each in given)


def _candidate(every: Sequence[Configuration], given: str | Configuration) -> Configuration:
    words: dict[str, Any] = {}
    if isinstance(given, Configuration):
        found, text = [each for each in every if each == given], given.short
    else:
        found, text = named_configurations(every, given, "configurations"), given
    if found:
        return found[0]
    if isinstance(given, str):
        try:
            words = parse_words(given, standard=False)
        except InputError as error:
            raise InputError(f"cannot try {text!r}: {error}") from error
    for knob, value in words.items():
        levels = {each.get(knob) for each in every}
        if not any(same_value(level, value) for level in levels):
            shown = ", ".join(sorted(str(level) for level in levels if level is not None))
            raise InputError(
                f"cannot try {text!r}: this search has no {knob}={value}"
                + (f"; its values are {shown}" if shown else "")
            )
    raise InputError(
        f"cannot try {text!r}: it is not a valid configuration of this search (tuner dev "
        "probe says why a configuration is not valid)"
    )

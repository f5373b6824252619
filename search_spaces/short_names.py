"""Short names of configurations: `dp8 mb16 zero1 1050MHz` for what takes a line as KNOB=VALUE.

Knobs come in the order of `tuner.search_spaces.knobs.KNOBS`, then other knobs as NAME=VALUE by
name. A knob at its default is left out, except for those that are always named.
What was shown is read back: words in any order, short or KNOB=VALUE, with or without the "|" of a
configuration's key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knobs import KNOBS, Value, knob_named, parse_value

#: Knobs by what stands before their value, as in mb=16.
_BY_AFFIX = {knob.affixes[0].rstrip("-"): name for name, knob in KNOBS.items() if knob.affixes[0]}
_LEFT = re.compile(r"=device['’]s[ _]own", re.IGNORECASE)
_SPACED = re.compile(r"(?<=\d)\s+(?=(MHz|W)\b)", re.IGNORECASE)


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return knob names in the one order in which they are shown: standard ones, then by name."""
    order = list(KNOBS)
    every = set(names)
    return tuple(sorted(every, key=lambda n: (order.index(n) if n in order else len(order), n)))


def short_word(name: str, value: Value | None) -> str:
    """Return one knob as a word: "mb16", "optim-cpu", "1050MHz", "clock-auto" if left alone."""
    if value is None:
        device = KNOBS[name].device if name in KNOBS else ""
        return device or f"{name}=device's own"
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    if name not in KNOBS:
        return f"{name}={text}"
    before, after = KNOBS[name].affixes
    return f"{before}{text}{after}"


def short_name(values: Mapping[str, Value | None], names: Iterable[str] | None = None) -> str:
    """Return knobs, or those of these names, as a short name; None is left to the device."""
    chosen = in_order(values) if names is None else tuple(names)
    named = [n for n in chosen if not _is_left_out(n, values.get(n))]
    return " ".join(short_word(n, values.get(n)) for n in named) or "default"


def _is_left_out(name: str, value: Value | None) -> bool:
    knob = KNOBS.get(name)
    if knob is not None and knob.always:
        return False
    return value is None or (knob is not None and value == knob.default)


def word_knob(word: str) -> tuple[str, Value | None] | None:
    """Return knob and value of one short word; None if it is none."""
    folded = word.strip().lower()
    for name, knob in KNOBS.items():
        if knob.device and folded == knob.device:
            return name, None
    for name, knob in KNOBS.items():
        before, after = knob.affixes
        if not folded.startswith(before) or not folded.endswith(after.lower()):
            continue
        middle = folded[len(before) : len(folded) - len(after)]
        named = {str(c).replace("_", ""): c for c in knob.choices}
        if named and name != "zero_stage":
            middle = str(named.get(middle.replace("_", ""), ""))
            if middle:
                return name, middle
        elif re.fullmatch(r"\d+(,\d+)*", middle):
            return name, parse_value(name, middle)
    return None


def parse_words(text: str, *, standard: bool = True) -> dict[str, Any]:
    """Return the knobs that a configuration's name gives; None for one left to the device.

    Args:
        standard: every knob must be a standard one with a legal value; else the value of an unknown
            knob is kept as text.
    """
    text = _SPACED.sub("", _LEFT.sub("=auto", text))
    found: dict[str, Any] = {}
    for word in text.replace("|", " ").split():
        name, equals, value = word.partition("=")
        if standard:  # else it may be the name of another knob
            name = _BY_AFFIX.get(name.lower(), name)
        parsed: Value | None
        if equals and value == "auto":
            parsed = None
        elif equals:
            parsed = parse_value(name, value) if standard or name in KNOBS else value
        else:
            known = word_knob(word)
            if known is None:
                raise InputError(
                    f"{word!r} is no knob; write KNOB=VALUE or a short name such as "
                    "'dp8 mb16 zero1 1050MHz'"
                )
            name, parsed = known
        if standard:
            knob_named(name)
        if name in found and found[name] != parsed:
            raise InputError(
                f"{name} is given twice, as {short_word(name, found[name])} and "
                f"{short_word(name, parsed)}"
            )
        found[name] = parsed
    return found


def split_words(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split the words of a command into those that name no knob, such as a job, and those that do.

    A word that names knobs is KNOB=VALUE, or short ones, several in one if it was quoted.
    """
    others: list[str] = []
    knobs: list[str] = []
    for word in words:
        parts = _SPACED.sub("", word).replace("|", " ").split()
        named = bool(parts) and all("=" in part or word_knob(part) is not None for part in parts)
        (knobs if named or "=" in word else others).append(word)
    return others, knobs


def values_of(words: Iterable[str]) -> dict[str, Value]:
    """Return the values that the words of `split_words` give to standard knobs."""
    found = parse_words(" ".join(words))
    return {name: value for name, value in found.items() if value is not None}

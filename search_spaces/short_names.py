"""Short names of configurations: `dp8 mb16 zero1 1050MHz` for what takes a line as KNOB=VALUE.

Knobs come in the order of `tuner.search_spaces.knobs.KNOBS`, then other knobs as NAME=VALUE by
name. A knob at its default is left out, except for the three in `ALWAYS`, which everybody names.
What was shown is read back: words in any order, short or KNOB=VALUE, with or without the "|" of a
configuration's key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knobs import KNOBS, Value, knob_named, parse_value

#: Knobs that are named also at their defaults.
ALWAYS = ("data_parallel", "micro_batch", "zero_stage")

#: What stands before and after a knob's value.
_AFFIXES: Mapping[str, tuple[str, str]] = {
    "data_parallel": ("dp", ""),
    "tensor_parallel": ("tp", ""),
    "pipeline_parallel": ("pp", ""),
    "pipeline_schedule": ("pipe-", ""),
    "virtual_stages": ("vs", ""),
    "sequence_parallel": ("sp", ""),
    "sequence_method": ("seq-", ""),
    "expert_parallel": ("ep", ""),
    "global_batch": ("gb", ""),
    "micro_batch": ("mb", ""),
    "zero_stage": ("zero", ""),
    "sharding": ("", ""),
    "hsdp_replicas": ("hsdp", ""),
    "optimizer_offload": ("optim-", ""),
    "parameter_offload": ("param-", ""),
    "activation_checkpointing": ("ckpt-", ""),
    "activation_offload": ("act-", ""),
    "compilation": ("compile-", ""),
    "fp8": ("fp8-", ""),
    "clock_MHz": ("", "MHz"),
    "memory_clock_MHz": ("mem", "MHz"),
    "power_limit_W": ("", "W"),
}
#: Knobs by what stands before their value, as in mb=16.
_BY_AFFIX = {before.rstrip("-"): name for name, (before, _) in _AFFIXES.items() if before}
#: A live knob that is left to the device.
_DEVICE = {"clock_MHz": "clock-auto", "memory_clock_MHz": "mem-auto", "power_limit_W": "power-auto"}
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
        return _DEVICE.get(name, f"{name}=device's own")
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    if name not in _AFFIXES:
        return f"{name}={text}"
    before, after = _AFFIXES[name]
    return f"{before}{text}{after}"


def short_name(values: Mapping[str, Value | None], names: Iterable[str] | None = None) -> str:
    """Return knobs as a short name.

    Args:
        values: by knob; None for a live knob that is left to the device.
        names: the knobs to name, in the order given; all of `values` if not given.
    """
    chosen = in_order(values) if names is None else tuple(names)
    named = [n for n in chosen if n in ALWAYS or not _is_default(n, values.get(n))]
    return " ".join(short_word(n, values.get(n)) for n in named) or "default"


def _is_default(name: str, value: Value | None) -> bool:
    return value is None or (name in KNOBS and value == KNOBS[name].default)


def word_knob(word: str) -> tuple[str, Value | None] | None:
    """Return knob and value of one short word; None if it is none.

    Raises:
        InvalidValue: the value is not legal for the knob.
    """
    folded = word.strip().lower()
    for name, text in _DEVICE.items():
        if folded == text:
            return name, None
    for name, (before, after) in _AFFIXES.items():
        if not folded.startswith(before) or not folded.endswith(after.lower()):
            continue
        middle = folded[len(before) : len(folded) - len(after)]
        if KNOBS[name].choices and name != "zero_stage":
            middle = {c.replace("_", ""): c for c in KNOBS[name].choices if isinstance(c, str)}.get(
                middle.replace("_", ""), ""
            )
            if middle:
                return name, middle
        elif re.fullmatch(r"\d+(,\d+)*", middle):
            return name, parse_value(name, middle)
    return None


def parse_words(text: str, *, standard: bool = True) -> dict[str, Any]:
    """Return the knobs that a configuration's name gives; None for one left to the device.

    Args:
        text: words in any order: short ones, KNOB=VALUE, and "|" between.
        standard: every knob must be a standard one with a legal value; else the value of an unknown
            knob is kept as text.

    Raises:
        UnknownName: a knob does not exist.
        InvalidValue: a value is not legal.
        InputError: a word is no knob, or a knob is given twice with different values.
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
    """Return the values that the words of `split_words` give to standard knobs.

    Raises:
        UnknownName: a knob does not exist.
        InvalidValue: a value is not legal.
        InputError: a knob is given twice with different values.
    """
    found = parse_words(" ".join(words))
    return {name: value for name, value in found.items() if value is not None}

"""Knobs of the search, as `data/catalogue/knobs.toml` declares them, and their short names.

A *launch* knob needs a new process to change; a *live* knob changes while the job runs. A recorded
table may have knobs that are not listed here; its own toml gives their kind. So may a job, whose
user declares them (`tuner.search_spaces.knob_declarations`).

A short name is `dp8 mb16 zero1 1050MHz` for what takes a line as KNOB=VALUE: knobs in the order of
`KNOBS`, then others as NAME=VALUE by name, without those at their defaults, except for those that
are always named. What was shown is read back: words in any order, short or KNOB=VALUE, with or
without the "|" of a configuration's key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tuner.search_spaces.data_files import catalogue
from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName, check_integer
from tuner.search_spaces.fields import plain_text

#: Value of a knob. A tuple has one value per pipeline stage.
Value = int | float | str | tuple[int, ...]
#: Upper limit of every degree, batch, clock and limit, so that products of them fit a float.
LARGEST = 10**9
#: Kinds of declared knobs, and short names of some.
KINDS = ("category", "integer", "log-integer", "float", "flag")
SHORT_KINDS = {"int": "integer", "log-int": "log-integer", "bool": "flag"}
#: Integers whose largest exceeds the smallest by more than this factor have a logarithmic scale.
_LOG_RATIO = 4
#: Characters of a wrong value that an error shows.
SHOWN = 80


@dataclass(frozen=True)
class StandardKnob:
    """Dimension of the search that joulefront knows.

    Attributes:
        scale: distance between values: "log2" (degrees, batches), "linear" (clocks, watts) or
            "category" (no order).
        default: the value if a configuration does not give one; None for a live knob, which is
            left to the device, and for the global batch, which is the job's.
        words: what its short name stands for.
    """

    name: str
    kind: Literal["launch", "live"]
    scale: Literal["log2", "linear", "category"]
    default: Value | None
    what: str
    words: str
    choices: tuple[Value, ...] = ()
    minimum: int | None = None
    changes_training: bool = False
    affixes: tuple[str, str] = ("", "")
    device: str = ""
    always: bool = False
    degree: bool = False
    argument: bool = False

    def check(self, value: object) -> Value:
        """Return `value` if it is legal, else raise InvalidValue with the legal range."""
        if self.choices:
            # By type too: 1.0 and True equal 1, but a degree or a stage is an integer.
            if not any(value == choice and type(value) is type(choice) for choice in self.choices):
                raise InvalidValue(self.name, value, "one of " + ", ".join(map(str, self.choices)))
            return value  # type: ignore[return-value]
        if isinstance(value, tuple | list):
            if self.kind == "live" and value and all(type(part) is int for part in value):
                for part in value:
                    self.check(part)
                return tuple(value)
            raise InvalidValue(self.name, value, f"an integer of at least {self.minimum}")
        return check_integer(self.name, value, least=self.minimum or 0, most=LARGEST)


def _standard(name: str, table: Mapping[str, Any]) -> StandardKnob:
    live, choices = table.get("kind") == "live", tuple(table.get("choices", ()))
    before, _, after = table["short"].partition("{}")
    default = choices[0] if choices else 1
    return StandardKnob(
        name,
        kind="live" if live else "launch",
        scale="linear" if live else "category" if choices else "log2",
        default=default if table.get("default", True) else None,
        what=table["what"],
        words=table.get("words", name.replace("_", " ")),
        choices=choices,
        minimum=None if choices else 1,
        changes_training=table.get("changes_training", False),
        affixes=(before, after),
        device=table.get("device", ""),
        always=table.get("always", False),
        degree=table.get("degree", False),
        argument=table.get("argument", False),
    )


KNOBS: Mapping[str, StandardKnob] = {
    name: _standard(name, table) for name, table in catalogue("knobs")["knobs"].items()
}


def knob_named(name: str) -> StandardKnob:
    """Return the standard knob of this name."""
    try:
        return KNOBS[name]
    except KeyError:
        raise UnknownName("knob", name, KNOBS) from None


def parse_value(name: str, text: str) -> Value:
    """Read a knob's value from the command line ("2", "cpu", "1200", "1200,1410")."""
    knob = knob_named(name)
    value: object = text
    try:
        parts = [int(part) for part in text.split(",")]
        value = parts[0] if len(parts) == 1 else tuple(parts)
    except ValueError:
        pass
    return knob.check(value)


def invalid(what: str, value: object, legal: str) -> InvalidValue:
    """Return the error of a wrong value, of which a long text is cut off."""
    text = repr(value)
    return InvalidValue(what, value if len(text) <= SHOWN else text[:SHOWN], legal)


def kind_of(values: Sequence[Any]) -> str:
    """Return the kind that the values of a declared knob have by themselves."""
    texts = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
    if all(text in ("true", "false") for text in texts):
        return "flag"
    if all(re.fullmatch(r"[-+]?\d+", text) for text in texts):
        return "integer"
    return "float" if all(_as_float(text) is not None for text in texts) else "category"


def _as_float(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < 1e18 else None


def is_log(values: Sequence[Value]) -> bool:
    """Return True if integers span so much that equal ratios are equal distances."""
    numbers = [value for value in values if isinstance(value, int)]
    return min(numbers) > 0 and max(numbers) > _LOG_RATIO * min(numbers)


def value_of(value: Any, kind: str, what: str) -> Value:
    """Return a value of a declared knob in the type of its kind."""
    if kind == "flag":
        text = str(value).lower()
        if text not in ("true", "false"):
            raise invalid(what, value, "true or false (a flag)")
        return text
    if kind in ("integer", "log-integer", "float"):
        number = None if isinstance(value, bool) else _as_float(value)
        if number is None or (kind != "float" and number != int(number)):
            raise invalid(what, value, "an integer" if kind != "float" else "a number")
        if kind == "float":
            return number
        # By way of a float only where it is written as one: 2**53 + 1 is not a float.
        return int(value) if re.fullmatch(r"[-+]?\d+", str(value)) else int(number)
    if isinstance(value, bool):
        return str(value).lower()
    if type(value) in (int, float):
        return value
    if not isinstance(value, str):
        raise invalid(what, value, "a number, a truth value or a text")
    if not value or re.search(r"[\s|{}]", plain_text(value, what)):
        raise invalid(what, value, "one word, without spaces, braces or |")
    return value


#: Knobs by what stands before their value, as in mb=16.
_BY_AFFIX = {knob.affixes[0].rstrip("-"): name for name, knob in KNOBS.items() if knob.affixes[0]}
_LEFT = re.compile(r"=device['’]s[ _]own", re.IGNORECASE)
_SPACED = re.compile(r"(?<=\d)\s+(?=(MHz|W)\b)", re.IGNORECASE)


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return knob names in the one order in which they are shown: standard ones, then by name."""
    order = list(KNOBS)
    every = set(names)
    return tuple(sorted(every, key=lambda n: (order.index(n) if n in order else len(order), n)))


def stage_values(value: Any) -> tuple[Any, ...]:
    """Return a knob's values by pipeline stage: one that all stages share, or none for None."""
    return value if by_stage(value) else () if value is None else (value,)


def by_stage(value: Any) -> bool:
    """Return whether a knob's value holds one for each pipeline stage."""
    return isinstance(value, tuple)


def delivered_names(name: str, value: Any) -> dict[str, Any]:
    """Return the values by stage by the names under which what ran is recorded: "clock_MHz", or
    "clock_MHz.0", "clock_MHz.1" and so on."""
    if by_stage(value):
        return {f"{name}.{stage}": each for stage, each in enumerate(value)}
    return {} if value is None else {name: value}


def value_text(value: Any) -> str:
    """Return a knob's value as text, such as "4" or "900,1050"."""
    return ",".join(map(str, value)) if by_stage(value) else str(value)


def short_word(name: str, value: Value | None) -> str:
    """Return one knob as a word: "mb16", "optim-cpu", "1050MHz", "clock-auto" if left alone."""
    if value is None:
        device = KNOBS[name].device if name in KNOBS else ""
        return device or f"{name}=device's own"
    text = value_text(value)
    if name not in KNOBS:
        return f"{name}={text}"
    before, after = KNOBS[name].affixes
    return f"{before}{text}{after}"


def short_name(values: Mapping[str, Value | None], names: Iterable[str] | None = None) -> str:
    """Return knobs, or those of these names, as a short name; None is left to the device."""
    chosen = in_order(values) if names is None else tuple(names)
    words = [short_word(n, values.get(n)) for n in chosen if _is_named(n, values.get(n))]
    return " ".join(words) or "default"


def _is_named(name: str, value: Value | None) -> bool:
    """Return True if a knob with this value is a word of a short name."""
    knob = KNOBS.get(name)
    if knob is None:
        return value is not None
    return knob.always or value not in (None, knob.default)


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

    If `standard`, every knob must be a standard one with a legal value; else the value of an
    unknown knob is kept as text.
    """
    text = _SPACED.sub("", _LEFT.sub("=auto", text))
    found: dict[str, Any] = {}
    for word in text.replace("|", " ").split():
        name, equals, value = word.partition("=")
        if standard:  # else it may be the name of another knob
            name = _BY_AFFIX.get(name.lower(), name)
        parsed: Value | None = None
        if equals and value != "auto":
            parsed = parse_value(name, value) if standard or name in KNOBS else value
        elif not equals:
            knob_word = word_knob(word)
            if knob_word is None:
                raise InputError(
                    f"{word!r} is not a knob; write KNOB=VALUE or a short name such as "
                    "'dp8 mb16 zero1 1050MHz'"
                )
            name, parsed = knob_word
        if standard:
            knob_named(name)
        if name in found and found[name] != parsed:
            both = " and ".join(short_word(name, each) for each in (found[name], parsed))
            raise InputError(f"{name} is given twice, as {both}")
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

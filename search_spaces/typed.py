"""Values from files, checked against what a dataclass declares of its fields.

A trace or a study.toml is written by this project and may be edited by anybody. What is read back
must be what the field says (a number, text, a tuple of numbers, ...), so that a wrong value is one
sentence where it is read and not a traceback where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from search_spaces.errors import InputError, InvalidValue

__all__ = ["check_fields", "names_a_file", "plain_setting"]

Made = TypeVar("Made")


def _is_number(value: Any) -> bool:
    # An integer of more than 300 digits is no float; NaN means "unknown" where it is allowed.
    return type(value) in (int, float) and (value != value or abs(value) <= 1e300)


def _many(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple | list) and all(map(check, value))


def _maybe(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


#: What the declared types that occur allow, and how that is said.
_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (_is_integer, "an integer"),
    "int | None": (_maybe(_is_integer), "an integer"),
    "float": (_is_number, "a number"),
    "float | None": (_maybe(_is_number), "a number"),
    "str": (_is_text, "text"),
    "str | None": (_maybe(_is_text), "text"),
    "Scope": (lambda value: value in ("gpu", "module", "node"), "gpu, module or node"),
    "FailureKind": (_is_text, "text"),
    "tuple[int, ...]": (_many(_is_integer), "a list of integers"),
    "tuple[float, ...]": (_many(_is_number), "a list of numbers"),
    "tuple[str, ...]": (_many(_is_text), "a list of texts"),
    "Mapping[str, float]": (
        lambda value: isinstance(value, Mapping) and all(map(_is_number, value.values())),
        "a table of numbers",
    ),
    "Mapping[str, Any]": (lambda value: isinstance(value, Mapping), "a table"),
}


def check_fields(
    made: Made, what: str, *, positive: Sequence[str] = (), finite: Sequence[str] = ()
) -> Made:
    """The same object, if its fields hold what they are declared to hold.

    Args:
        made: a dataclass whose module postpones annotations.
        what: what it is, for the sentence: "measurement".
        positive: fields that must be finite and above 0.
        finite: fields that must be finite.

    Raises:
        InvalidValue: a field holds something else.
    """
    for item in fields(made):  # type: ignore[arg-type]
        value = getattr(made, item.name)
        check, legal = _CHECKS.get(str(item.type), (lambda value: True, ""))
        if not check(value):
            raise InvalidValue(f"{item.name} of a {what}", _short(value), legal)
        if item.name in positive and not 0 < value < math.inf:
            raise InvalidValue(f"{item.name} of a {what}", value, "a number above 0")
        if item.name in finite and not math.isfinite(value):
            raise InvalidValue(f"{item.name} of a {what}", value, "a finite number")
    return made


def names_a_file(path: Path | Traversable) -> bool:
    """Whether a path that a user or a file gave is a file's; one that no system takes is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with a NUL in it
        return False


def plain_setting(data: Any, what: str) -> Mapping[str, Any]:
    """A table of knob values: numbers, texts, or lists of them.

    Raises:
        InputError: it is none.
    """

    def plain(value: Any) -> bool:
        return value is None or isinstance(value, bool | str) or _is_number(value)

    if not isinstance(data, Mapping):
        raise InputError(f"{what} is {_short(data)!r}; it must be a table of knobs")
    for name, value in data.items():
        parts = value if isinstance(value, list | tuple) else [value]
        if not isinstance(name, str) or not all(map(plain, parts)):
            raise InvalidValue(f"{name} in {what}", _short(value), "a value of a knob")
    return data


def _short(value: Any) -> Any:
    """What a sentence can show of it."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**50 else "a huge integer"
    return value if len(text) <= 80 else text[:80]

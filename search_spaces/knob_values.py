"""Values of declared knobs: their kinds, and each value in the type of its kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

from tuner.search_spaces.errors import InvalidValue
from tuner.search_spaces.knobs import Value
from tuner.search_spaces.typed import plain_text

Kind = Literal["category", "integer", "log-integer", "float", "flag"]
KINDS: tuple[str, ...] = get_args(Kind)
SHORT_KINDS = {"int": "integer", "log-int": "log-integer", "bool": "flag"}
#: Integers whose largest exceeds the smallest by more than this factor have a logarithmic scale.
_LOG_RATIO = 4
#: Characters of a wrong value that an error shows.
SHOWN = 80


def invalid(what: str, value: object, legal: str) -> InvalidValue:
    """Return the error of a wrong value, of which a long text is cut off."""
    text = repr(value)
    return InvalidValue(what, value if len(text) <= SHOWN else text[:SHOWN], legal)


def kind_of(values: Sequence[Any]) -> str:
    """Return the kind that values have by themselves."""
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
    """Return a value in the type of its kind."""
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


def words_of(value: Any, what: str) -> tuple[str, ...]:
    """Return the words of a command, which no shell reads."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise invalid(what, value, "a list of words; no shell reads them")
    if not all(isinstance(word, str) and word for word in value):
        raise invalid(what, list(value), "a list of words")
    return tuple(plain_text(word, what) for word in value)

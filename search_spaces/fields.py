"""Fields of dataclasses: their values in JSON and files, and options that are declared once.

A trace or a study.toml is written by this project and may be edited by hand. A value of another
type than its field (a number, text, a tuple of numbers, ...) is reported by one sentence when it is
read, and not by a traceback when it is used.

Made of the declarations of options: the options of the command line
(`tuner.cli.options.add_options`), the keywords of the API, their validation, and the sections of
study.toml.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    NotRequired,
    Required,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName

Made = TypeVar("Made")


def _is_number(value: Any) -> bool:
    # An integer of more than 300 digits is no float; NaN means "unknown" where it is allowed.
    return (
        isinstance(value, int | float)  # NumPy's float64 is a float
        and not isinstance(value, bool)
        and (value != value or abs(value) <= 1e300)
    )


def _many(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple | list) and all(map(check, value))


def _maybe(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


#: Check and description of each declared type.
TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (_is(bool), "true or false"),
    "int": (_is_integer, "an integer"),
    "int | None": (_maybe(_is_integer), "an integer"),
    "float": (_is_number, "a number"),
    "float | None": (_maybe(_is_number), "a number"),
    "str": (_is(str), "text"),
    "str | None": (_maybe(_is(str)), "text"),
    "Scope": (
        lambda value: value in ("gpu", "module", "node", "none"),
        "gpu, module, node or none",
    ),
    "tuple[int, ...]": (_many(_is_integer), "a list of integers"),
    "tuple[float, ...]": (_many(_is_number), "a list of numbers"),
    "tuple[str, ...]": (_many(_is(str)), "a list of texts"),
    "Mapping[str, float]": (
        lambda value: isinstance(value, Mapping) and all(map(_is_number, value.values())),
        "a table of numbers",
    ),
    "Mapping[str, Any]": (_is(Mapping), "a table"),
}


def check_fields(
    made: Made, subject: str, *, positive: Sequence[str] = (), finite: Sequence[str] = ()
) -> Made:
    """Return an object if its fields have their declared types."""
    for item in fields(made):  # type: ignore[arg-type]
        value = getattr(made, item.name)
        check, legal = TYPES.get(str(item.type), (lambda value: True, ""))
        if not check(value):
            raise InvalidValue(f"{item.name} of a {subject}", shortened(value), legal)
        if item.name in positive and not 0 < value < math.inf:
            raise InvalidValue(f"{item.name} of a {subject}", value, "a number above 0")
        if item.name in finite and not math.isfinite(value):
            raise InvalidValue(f"{item.name} of a {subject}", value, "a finite number")
    return made


def has_shape(value: Any, shape: Any) -> bool:
    """Return True if a value of JSON has a declared shape.

    Args:
        shape: a TypedDict (other keys are allowed), `list[X]`, `tuple[X, Y]`, `dict[str, X]`, a
            union, `Annotated[int, range(...)]`, a plain type or Any.
    """
    origin, parts = get_origin(shape), get_args(shape)
    if shape is Any:
        return True
    if is_typeddict(shape):
        # Not by `__required_keys__`: where annotations are texts, NotRequired is not seen in them.
        return isinstance(value, dict) and all(
            has_shape(value[name], part)
            if name in value
            else get_origin(part) is NotRequired
            or not (shape.__total__ or get_origin(part) is Required)
            for name, part in get_type_hints(shape, include_extras=True).items()
        )
    if origin is Annotated:
        return has_shape(value, parts[0]) and all(value in limits for limits in parts[1:])
    if origin in (NotRequired, Required):
        return has_shape(value, parts[0])
    if origin in (Union, UnionType):
        return any(has_shape(value, part) for part in parts)
    if origin is tuple:
        return (
            isinstance(value, list)
            and len(value) == len(parts)
            and all(map(has_shape, value, parts))
        )
    if origin is list:
        return isinstance(value, list) and all(has_shape(each, parts[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(has_shape(each, parts[1]) for each in value.values())
    kinds = (int, float) if shape is float else shape
    return isinstance(value, kinds) and (shape is bool or not isinstance(value, bool))


#: Version of what every --json prints; it rises if a key changes its meaning or goes.
JSON_SCHEMA = 2


def strict_json(value: Any) -> Any:
    """Convert a value for JSON: NaN and infinities to None, tuples to lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(part) for part in value]
    return value


def dump_fields(made: Any) -> dict[str, Any]:
    """Convert a dataclass to JSON by its fields, in their order.

    A part with a method `to_json` is converted by it, any other dataclass by its fields.
    """

    def dumped(value: Any) -> Any:
        if hasattr(value, "to_json"):
            return value.to_json()
        if is_dataclass(value):
            return dump_fields(value)
        if isinstance(value, list | tuple):
            return [dumped(part) for part in value]
        return strict_json(value)

    return {item.name: dumped(getattr(made, item.name)) for item in fields(made)}


def read_fields(
    kind: type[Made],
    data: Mapping[str, Any],
    subject: str,
    *,
    positive: Sequence[str] = (),
    finite: Sequence[str] = (),
    **readers: Callable[[Any], Any],
) -> Made:
    """Make a dataclass of the output of `dump_fields`, and check it.

    A field that is missing takes its default; None is NaN where that is the default. Other keys are
    ignored.

    Args:
        readers: by field, a function that makes its value of the stored one.

    Raises:
        TypeError: `data` is no object, or a field without a default is missing.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"a {subject} is a table, not {shortened(data)}")
    values: dict[str, Any] = {}
    for item in fields(kind):  # type: ignore[arg-type]
        if item.name not in data:
            continue
        value = data[item.name]
        if item.name in readers:
            value = readers[item.name](value)
        elif value is None and item.default != item.default:
            value = math.nan
        elif str(item.type).startswith("tuple["):
            value = tuple(value)
        values[item.name] = value
    return check_fields(kind(**values), subject, positive=positive, finite=finite)


def whole_number(text: str) -> int | None:
    """Return the number that a text of digits is, or None.

    Python's own tests let through digits that `int` does not take, such as "²", and more digits
    than it takes.
    """
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def names_a_file(path: Path | Traversable) -> bool:
    """Return True if a path is a file's; False also for paths that the system refuses."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with a NUL in it
        return False


def plain_setting(data: Any, subject: str) -> Mapping[str, Any]:
    """Check a table of knob values (numbers, texts, or lists of them) and return it."""

    def plain(value: Any) -> bool:
        return value is None or isinstance(value, bool | str) or _is_number(value)

    if not isinstance(data, Mapping):
        raise InputError(f"{subject} is {shortened(data)!r}; it must be a table of knobs")
    for name, value in data.items():
        parts = value if isinstance(value, list | tuple) else [value]
        if not isinstance(name, str) or not all(map(plain, parts)):
            raise InvalidValue(f"{name} in {subject}", shortened(value), "a value of a knob")
        for text in (name, *parts):
            if isinstance(text, str):
                plain_text(text, f"a knob's name or value in {subject}")
    return data


#: C0 and C1 control characters, line and paragraph separators, and characters that reorder text
#: (Unicode's property Bidi_Control). They would break a line of a script, a terminal or a report.
_NOT_PLAIN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def plain_text(text: str, subject: str) -> str:
    """Check that a text is displayed as one line, in its own order, and return it."""
    if _NOT_PLAIN.search(text):
        raise InvalidValue(
            subject, shortened(text), "text without line breaks, control or direction characters"
        )
    return text


def one_line(text: str) -> str:
    """Return text as one line in its own order: unprintable characters as `\\x1b` or `\\u202e`."""
    line = " ".join(text.split())
    return "".join(part if part.isprintable() else repr(part)[1:-1] for part in line)


#: Most characters of a word that `shown_word` shows.
MOST_SHOWN = 120


def shown_word(value: Any) -> str:
    """Return a value as one word that is not taken for anything else in a line.

    Of a long text the middle is left out, with the number of its characters. A text of other
    characters than words, paths and numbers have stands in quotes, as Python writes it.
    """
    text = str(value)
    if len(text) > MOST_SHOWN:
        left_out = f"... {len(text) - MOST_SHOWN:,} more characters ..."
        text = text[: MOST_SHOWN // 2] + left_out + text[-MOST_SHOWN // 2 :]
    return text if re.fullmatch(r"[\w./:@%+~<>-]+", text, re.ASCII) else ascii(text)


def shortened(value: Any) -> Any:
    """Return a value for a sentence, or the beginning of a long one's text."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**50 else "a huge integer"
    return value if len(text) <= 80 else text[:80]


Kind = TypeVar("Kind")

#: Sizes of the units that a user may type ("2h", "11kWh", "5%") by the declared one. Case matters,
#: because "MJ" is not "mJ".
UNITS: dict[str, dict[str, float]] = {
    "s": {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0},
    "kJ": {
        **{"J": 1e-3, "kJ": 1.0, "MJ": 1e3, "GJ": 1e6},
        **{"Wh": 3.6, "kWh": 3600.0, "MWh": 3.6e6, "GWh": 3.6e9},
    },
    "W": {"W": 1.0, "kW": 1e3, "MW": 1e6},
    "share": {"%": 0.01},
}
#: Values to show in help texts and errors.
EXAMPLES = {
    "s": "2h, 90m or 7200s",
    "kJ": "11kWh or 40MJ",
    "W": "2kW or 800W",
    "share": "5%",
}


@dataclass(frozen=True)
class Option:
    """Declaration of one option, beside the type and the default of its field.

    Attributes:
        flag: name on the command line, without dashes, where it is not the field's.
        alias: name on the command line of the same value with its unit ("deadline", as in
            `--deadline 2h`, beside `--deadline-s 7200`); `unit` is one of `UNITS`.
        metavar: placeholder of the value in the help; made of the type where empty.
        negated: help of --no-FLAG, where it is not "do not " and the help.
    """

    help: str
    unit: str = ""
    above: float | None = None
    least: int | None = None
    choices: tuple[str, ...] = ()
    flag: str = ""
    alias: str = ""
    metavar: str = ""
    keyword_only: bool = False
    negated: str = ""


def option(default: Any, help: str, **more: Any) -> Any:
    """Declare a dataclass field as an option; `more` as the attributes of `Option`."""
    return field(default=default, metadata={"option": Option(help, **more)})


def declared_options(kind: type) -> Iterator[tuple[Field[Any], Option]]:
    """Yield the fields of a dataclass that are options, with their declarations."""
    for item in fields(kind):
        if "option" in item.metadata:
            yield item, item.metadata["option"]


def limited(*, default: Any = MISSING, **more: Any) -> Any:
    """Declare the limits of a dataclass field without an option; `more` as for `Option`."""
    return field(default=default, metadata={"option": Option("", **more)})


class Checked:
    """Base of a dataclass whose declared fields are checked when an object is made."""

    def __post_init__(self) -> None:
        check_options(self)


def check_options(made: Any, where: str = "") -> None:
    """Check every declared field of a dataclass object against its declaration.

    Its module postpones annotations; `where` follows a field's name in a sentence.
    """
    for item, declared in declared_options(type(made)):
        value, (kind, *none) = getattr(made, item.name), str(item.type).split(" | ")
        if value is None and none:
            continue
        if declared.choices and value not in declared.choices:
            raise UnknownName(item.name, str(value), declared.choices)
        legal = TYPES[kind][1] if kind in TYPES else ""
        if kind in ("int", "float") and declared.above is not None:
            legal += f" greater than {declared.above:g}"
        elif kind in ("int", "float") and declared.least is not None:
            legal += f" of at least {declared.least}"
        if legal and not _is_legal(value, kind, declared):
            raise InvalidValue(f"{item.name} {where}".strip(), shortened(value), legal)


def _is_legal(value: Any, kind: str, declared: Option) -> bool:
    if kind not in ("int", "float"):
        return TYPES[kind][0](value)
    least = -1e300 if declared.least is None else declared.least
    number = TYPES[kind][0](value) and least <= value <= 1e300
    return number and (declared.above is None or value > declared.above)


def read_options(
    kind: type[Kind], section: Mapping[str, Any], where: str, *, strict: bool = False
) -> Kind:
    """Return the dataclass object of a table of values; missing ones take their defaults."""
    names = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    if strict and not section.keys() <= names:
        raise UnknownName(f"name in {where}", str(min(section.keys() - names)), names)
    try:
        return kind(**{name: value for name, value in section.items() if name in names})
    except InvalidValue as error:
        raise InvalidValue(f"{error.subject} in {where}", error.value, error.legal) from error
    except TypeError as error:
        raise InputError(f"{where} cannot be read: {error}") from error


def parse_quantity(text: str, unit: str) -> float:
    """Return a quantity in `unit`; InputError for a number without a unit."""
    sizes = UNITS[unit]
    found = re.fullmatch(r"\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?|[-+]?nan|[-+]?inf)\s*(\S*)\s*", text)
    try:
        number = float(found[1]) if found else None
    except ValueError:
        number = None
    given = found[2] if found else ""
    if number is None or (given not in sizes):
        names = ", ".join(sizes)
        raise InputError(
            f"{text!r} must be a number with a unit ({names}), such as {EXAMPLES[unit]}"
        )
    return number * sizes[given]

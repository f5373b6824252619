"""Options declared once: a dataclass field with its type, default, unit, help text and limits.

Made of the declarations: the options of the command line (`tuner.cli.options.add_options`), the
keywords of the API, their validation, and the sections of study.toml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName
from tuner.search_spaces.typed_json import TYPES, shortened

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

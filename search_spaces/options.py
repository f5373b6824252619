"""Options declared once: a dataclass field with its type, default, unit, help text and limits.

Made of the declarations: the options of the command line (`tuner.cli.options.add_options`), the
keywords of the API, their validation, and the sections of study.toml.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Option:
    """Declaration of one option, beside the type and the default of its field.

    Attributes:
        above: the value must be greater than this.
        flag: name on the command line, without dashes, where it is not the field's.
        former_flag: name on the command line in the release before; hidden, and still accepted.
        alias: name on the command line of the same value with its unit ("deadline", as in
            `--deadline 2h`, beside `--deadline-s 7200`); `unit` is one of
            `tuner.search_spaces.units.UNITS`.
        metavar: placeholder of the value in the help; made of the type where empty.
        keyword_only: available in Python only, not on the command line.
        negated: help of --no-FLAG, where it is not "do not " and the help.
    """

    help: str
    unit: str = ""
    above: float | None = None
    least: int | None = None
    choices: tuple[str, ...] = ()
    flag: str = ""
    former_flag: str = ""
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


def check_options(made: Any) -> None:
    """Check every option of a dataclass object against its declaration.

    Args:
        made: the object; its module postpones annotations.

    Raises:
        InvalidValue: a value has another type or lies outside its limits.
        UnknownName: a value is not among its choices.
    """
    for item, declared in declared_options(type(made)):
        value = getattr(made, item.name)
        kinds = {kind.strip() for kind in str(item.type).split("|")}
        if value is None and "None" in kinds:
            continue
        if declared.choices and value not in declared.choices:
            raise UnknownName(item.name, str(value), declared.choices)
        legal = _legal(kinds, declared)
        if legal and not _is_legal(value, kinds, declared):
            raise InvalidValue(item.name, value, legal)


def _legal(kinds: set[str], declared: Option) -> str:
    """Return the phrase of what is allowed; "" where anything is."""
    if "bool" in kinds:
        return "true or false"
    number = "an integer" if "int" in kinds else "a number" if "float" in kinds else ""
    if number and declared.above is not None:
        return f"{number} greater than {declared.above:g}"
    if number and declared.least is not None:
        return f"{number} of at least {declared.least}"
    return number or ("text" if "str" in kinds else "")


def _is_legal(value: Any, kinds: set[str], declared: Option) -> bool:
    if "bool" in kinds:
        return isinstance(value, bool)
    if "str" in kinds:
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int if "int" in kinds else (int, float)):
        return False
    least = -1e300 if declared.least is None else declared.least
    return least <= value <= 1e300 and (declared.above is None or value > declared.above)


def read_options(
    kind: type[Kind], section: Mapping[str, Any], where: str, *, strict: bool = False
) -> Kind:
    """Return the dataclass object of a table of values; what the table lacks takes its default.

    Args:
        strict: refuse other names instead of leaving them out.

    Raises:
        InputError: a value is not allowed.
    """
    names = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    if strict and not section.keys() <= names:
        raise UnknownName(f"name in {where}", str(min(section.keys() - names)), names)
    try:
        return kind(**{name: value for name, value in section.items() if name in names})
    except InvalidValue as error:
        raise InvalidValue(f"{error.what} in {where}", error.value, error.legal) from error
    except TypeError as error:
        raise InputError(f"{where} cannot be read: {error}") from error

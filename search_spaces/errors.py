"""Errors that a user can cause.

Every error a user can cause is an `InputError`: one sentence that names the value, the reason and
what is allowed instead. The command prints that sentence and exits with 2; a traceback means a bug.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Self

#: Names that a sentence lists; with a close match at hand fewer are of use.
MOST_LISTED, MOST_LISTED_WITH_MATCH = 15, 8


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return "; did you mean 'optimize'?" for the name most like the given one, or ""."""
    folded = {_folded(other): other for other in choices}
    close = get_close_matches(_folded(name), folded, n=1, cutoff=0.66)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""


def _folded(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter not in "-_. ")


class InputError(ValueError):
    """Invalid input. `str(error)` is one sentence: the value, the reason and the allowed values."""

    def __str__(self) -> str:
        # A name or value in a file may hold several lines.
        return " ".join(line for line in super().__str__().splitlines() if line)

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses have other arguments than their sentence; errors of remote workers are pickled.
        return (type(self)._rebuilt, (self.args, dict(self.__dict__)))

    @classmethod
    def _rebuilt(cls, args: tuple[Any, ...], state: dict[str, Any]) -> Self:
        error = cls.__new__(cls)
        error.args = args
        error.__dict__.update(state)
        return error


def reason(error: BaseException) -> str:
    """Return why something could not be read, for a sentence that names it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError):
        return f"there is no {error}"
    return str(error) or type(error).__name__


class UnknownName(InputError):
    """Name that does not exist; a phrase "or ..." comes last in the list of those that do."""

    def __init__(self, kind: str, name: str, choices: Iterable[str], *, where: str = "") -> None:
        self.kind, self.name = kind, name
        self.choices = tuple(sorted(choices, key=lambda text: (text.startswith("or "), text)))
        names = [other for other in self.choices if not other.startswith("or ")]
        phrases = self.choices[len(names) :]
        hint = did_you_mean(name, names)
        most = MOST_LISTED_WITH_MATCH if hint else MOST_LISTED
        if len(names) > most:
            names[most:] = [f"and {len(names) - most} more"]
        listed = ", ".join([*names, *phrases]) or "none"
        super().__init__(f"unknown {kind} {name!r}{where}{hint or ';'} known: {listed}")


#: A value of a file may be as large as the file, or larger where YAML names parts of it again.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 200, 200, 60
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 10
#: Of longer integers Python makes no text, or one that nobody reads.
_MOST_BITS = 64


class InvalidValue(InputError):
    """Value outside its legal range."""

    def __init__(self, subject: str, value: object, legal: str) -> None:
        self.subject, self.value, self.legal = subject, value, legal
        super().__init__(f"{subject} is {_shown(value)}; it must be {legal}")


def _shown(value: object) -> str:
    """Return a value for a sentence; of a number of very many digits its size alone."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"about 10^{value.bit_length() * 0.30103:.0f}"
    return _SHORT.repr(value)


#: Upper limit of every size and count, so that products of several fit a float.
LARGEST = 10**12


def check_integer(subject: str, value: object, *, least: int = 1, most: int = LARGEST) -> int:
    """Return a value that must be an integer from `least` to `most`; a truth value is none."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidValue(subject, value, f"an integer of at least {least}")
    if value > most:
        limit = f"{most:,}" if most < 1e9 else f"{most:g}"
        raise InvalidValue(subject, value, f"at most {limit}")
    return value


class NothingToTry(InputError):
    """A script of which nothing can be turned; the sentence holds a command that would."""


class InvalidConfiguration(InputError):
    """Configuration that violates a rule."""

    def __init__(self, configuration: str, reasons: Iterable[str]) -> None:
        self.configuration, self.reasons = configuration, tuple(reasons)
        super().__init__(f"configuration {configuration} cannot run: {'; '.join(self.reasons)}")

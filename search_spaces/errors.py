"""Errors that a user can cause.

Every error a user can cause is an `InputError`: one sentence that names the value, the reason and
what is allowed instead. The command prints that sentence and exits with 2; a traceback means a bug.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["InputError", "InvalidConfiguration", "InvalidValue", "UnknownName"]


class InputError(ValueError):
    """Invalid input. `str(error)` is one sentence: the value, the reason and what is allowed."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses have other arguments than their sentence; errors of remote workers are pickled.
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


def _rebuild(kind: type[InputError], args: tuple[Any, ...], state: dict[str, Any]) -> InputError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class UnknownName(InputError):
    """Name that does not exist.

    Attributes:
        kind: kind of thing that was looked up ("knob", "job", "cluster", ...).
        name: the given name.
        known: the names that exist, sorted; a phrase "or ..." comes last.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name = kind, name
        self.known = tuple(sorted(known, key=lambda text: (text.startswith("or "), text)))
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(self.known) or 'none'}")


class InvalidValue(InputError):
    """Value outside its legal range.

    Attributes:
        what: the quantity and its place ("global_batch in job.toml").
        value: the given value.
        legal: phrase for the allowed values.
    """

    def __init__(self, what: str, value: object, legal: str) -> None:
        self.what, self.value, self.legal = what, value, legal
        super().__init__(f"{what} is {value!r}; it must be {legal}")


class InvalidConfiguration(InputError):
    """Configuration that violates a rule.

    Attributes:
        configuration: the configuration's key.
        reasons: one phrase for each violated rule.
    """

    def __init__(self, configuration: str, reasons: Iterable[str]) -> None:
        self.configuration, self.reasons = configuration, tuple(reasons)
        super().__init__(f"configuration {configuration} cannot run: {'; '.join(self.reasons)}")

"""Configurations that the user wants to be tried first, checked against the candidates."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.problem.configuration_names import named_configurations, same_value
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.short_names import parse_words


def first_tries(
    candidates: Candidates, given: Sequence[str | Configuration]
) -> tuple[Configuration, ...]:
    """Return the candidates that these configurations or names mean; InputError otherwise."""
    return tuple(_candidate(candidates, each) for each in given)


def _candidate(candidates: Candidates, given: str | Configuration) -> Configuration:
    if isinstance(given, Configuration):
        found = [each for each in candidates.configurations if each == given]
        text = given.short
    else:
        found = named_configurations(candidates.configurations, given, "configurations")
        text = given
    if found:
        return found[0]
    try:
        words = {} if isinstance(given, Configuration) else parse_words(given, standard=False)
    except InputError as error:
        raise InputError(f"cannot try {text!r}: {error}") from error
    for knob, value in words.items():
        levels = {each.get(knob) for each in candidates.configurations}
        if not any(same_value(level, value) for level in levels):
            shown = ", ".join(sorted(str(level) for level in levels if level is not None))
            raise InputError(
                f"cannot try {text!r}: this search has no {knob}={value}"
                + (f"; its values are {shown}" if shown else "")
            )
    raise InputError(
        f"cannot try {text!r}: it is not a valid configuration of this search (tuner dev "
        "probe says why a configuration is not valid)"
    )

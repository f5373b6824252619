"""What the user expects of the search: configurations to try first, and preferred knob values.

Preferences multiply the score of a probe by pi(x)^(beta / n), with pi(x) the product of the weights
of its knob values over the largest such product and n the number of measurements: pi-BO (Hvarfner
et al. 2022, "pi-BO: Augmenting acquisition functions with user beliefs for Bayesian optimization",
ICLR). The more is measured, the less they count, so a wrong preference loses its weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.formatting import number
from tuner.problem.configuration_names import named_configurations, same_value
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.short_names import parse_words, word_knob

#: Exponent of the preference at the first measurement. The paper takes a tenth of the search's
#: evaluations, and a search makes some tens of measurements.
BETA = 5.0


@dataclass(frozen=True)
class UserPrior:
    """Expectations of the user.

    Attributes:
        log_weights: log of the weight of each candidate over the largest, (candidates,); None if no
            value is preferred.
    """

    first: tuple[Configuration, ...] = ()
    log_weights: np.ndarray | None = None

    def weights(self, measured: int) -> np.ndarray | float:
        """Return the factor of each candidate's score after this number of measurements."""
        if self.log_weights is None:
            return 1.0
        return np.asarray(np.exp(self.log_weights * BETA / max(measured, 1)))


def user_prior(
    candidates: Candidates,
    *,
    try_first: Sequence[str | Configuration] = (),
    prefer: Sequence[str] = (),
) -> UserPrior:
    """Return the expectations of a user, checked against the candidates.

    Args:
        try_first: configurations or their names ("dp8 mb4 zero1").
        prefer: weights of knob values, "zero1:3" or "zero_stage=1:3", several separated by spaces;
            a value without a weight has 1.

    Raises:
        InputError: something named is not among the candidates, or a weight is no positive number.
    """
    first = tuple(_named(candidates, each) for each in try_first)
    given = [_weight(word) for text in prefer for word in text.replace(",", " ").split()]
    if not given:
        return UserPrior(first)
    log_weights = np.zeros(len(candidates))
    for word, knob, value, weight in given:
        values = [configuration.get(knob) for configuration in candidates.configurations]
        right = np.array([same_value(each, value) for each in values])
        if not right.any():
            levels = sorted({str(each) for each in values if each is not None})
            what = f"value of {knob}" if levels else "knob of this search"
            raise UnknownName(f"preferred {what}", word, levels)
        log_weights[right] += math.log(weight)
    return UserPrior(first, log_weights - log_weights.max())


def _named(candidates: Candidates, given: str | Configuration) -> Configuration:
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


def _weight(word: str) -> tuple[str, str, object, float]:
    """Return word, knob, value and weight of a preference.

    Raises:
        InputError: it is not KNOB=VALUE:WEIGHT with a positive weight.
    """
    name, _, text = word.rpartition(":")
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not name or not weight > 0 or math.isinf(weight):
        raise InputError(
            f"{word!r} is no preference; write KNOB=VALUE:WEIGHT with a positive weight, such as "
            f"zero1:{number(3)}"
        )
    # "zero=1" is read as "zero1".
    knob, value = word_knob(name.replace("=", "")) or next(
        iter(parse_words(name, standard=False).items())
    )
    return word, knob, value, weight

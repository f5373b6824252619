"""How power rises with temperature, where temperature was recorded.

A warmer device leaks more, so two windows of one configuration differ by how warm the devices were.
log P = (the configuration's own) + k (T - mean T): k is told by configurations that were measured
at several temperatures, and by nothing else, so that a clock that heats is not mistaken for heat.
It starts from no effect and is shrunk towards it while the windows say little.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

__all__ = ["at_one_temperature", "rise_per_C"]

#: Standard deviation of k before any window, a kelvin (an estimate: 0.4 % of the power), and of a
#: window's log power about its configuration's own (1 to 3 %: `models.simulated`).
PRIOR_PER_C, WINDOW = 0.004, 0.02


def rise_per_C(
    configurations: Sequence[Hashable], log_power: np.ndarray, temperature_C: np.ndarray
) -> float:
    """k: the share by which power rises a kelvin, from windows within one configuration.

    Args:
        configurations: what each window measured; only equal ones are compared.
        log_power: of each window, (n,).
        temperature_C: of each window, (n,); NaN where it was not recorded.
    """
    number = {each: i for i, each in enumerate(dict.fromkeys(configurations))}
    group = np.array([number[each] for each in configurations], dtype=int)
    known = np.isfinite(temperature_C)
    along = across = 0.0
    for place in np.unique(group[known]):
        rows = known & (group == place)
        warmer = temperature_C[rows] - temperature_C[rows].mean()
        along += float(warmer @ (log_power[rows] - log_power[rows].mean()))
        across += float(warmer @ warmer)
    return along / (across + (WINDOW / PRIOR_PER_C) ** 2)


def at_one_temperature(
    configurations: Sequence[Hashable], log_power: np.ndarray, temperature_C: np.ndarray
) -> np.ndarray:
    """Log power as it would have been at the windows' mean temperature, (n,).

    A window whose temperature is not known stays as it is.
    """
    known = np.isfinite(temperature_C)
    if not known.any():
        return log_power
    rise = rise_per_C(configurations, log_power, temperature_C)
    warmer = np.where(known, temperature_C - temperature_C[known].mean(), 0.0)
    return np.asarray(log_power - rise * warmer)

"""Rise of power with temperature, estimated from windows with recorded temperatures.

A warmer device leaks more, so two windows of one configuration differ by the devices' temperature.
log P = (the configuration's own) + k (T - mean T): k is estimated only from configurations that
were measured at several temperatures, so that the effect of a higher clock is not attributed to
heat. It is shrunk towards 0, its prior mean, while there are few windows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

#: Standard deviation of k before any window, per kelvin (an estimate: 0.4 % of the power), and of a
#: window's log power about its configuration's own (1 to 3 %: `tuner.models.simulated`).
PRIOR_PER_C, WINDOW = 0.004, 0.02


def rise_per_C(
    configurations: Sequence[Hashable], log_power: np.ndarray, temperature_C: np.ndarray
) -> float:
    """Return k, the share by which power rises per kelvin, from windows of one configuration.

    Args:
        log_power: log power of each window, (n,).
        temperature_C: temperature of each window, (n,); NaN if it was not recorded.
    """
    number = {each: i for i, each in enumerate(dict.fromkeys(configurations))}
    group = np.array([number[each] for each in configurations], dtype=int)
    recorded = np.isfinite(temperature_C)
    along = across = 0.0
    for place in np.unique(group[recorded]):
        rows = recorded & (group == place)
        warmer = temperature_C[rows] - temperature_C[rows].mean()
        along += float(warmer @ (log_power[rows] - log_power[rows].mean()))
        across += float(warmer @ warmer)
    return along / (across + (WINDOW / PRIOR_PER_C) ** 2)


def at_one_temperature(
    configurations: Sequence[Hashable], log_power: np.ndarray, temperature_C: np.ndarray
) -> np.ndarray:
    """Return the log power corrected to the windows' mean temperature, (n,).

    A window without a recorded temperature is not corrected.
    """
    recorded = np.isfinite(temperature_C)
    if not recorded.any():
        return log_power
    rise = rise_per_C(configurations, log_power, temperature_C)
    warmer = np.where(recorded, temperature_C - temperature_C[recorded].mean(), 0.0)
    return np.asarray(log_power - rise * warmer)

"""Frameworks as data: where each takes the knobs, one TOML file a framework and range of versions.

`driver` reads a file, `keys` finds the one of a command and compares the keys with the installed
version, `settings` reads and writes keys in a command, its file and its environment, `bound_driver`
applies a configuration, and its `DriverKeys` is the way to set a knob. `training` reads what a
command or its file trains, for a prediction, from the facts that the same keys state.
"""

from tuner.workload.scripts.frameworks.bound_driver import Bound
from tuner.workload.scripts.frameworks.driver import (
    Driver,
    check_version,
    load_drivers,
    shipped_drivers,
    starts_of,
)
from tuner.workload.scripts.frameworks.keys import best_fit, recognised

__all__ = [
    "Bound",
    "Driver",
    "best_fit",
    "check_version",
    "load_drivers",
    "recognised",
    "shipped_drivers",
    "starts_of",
]

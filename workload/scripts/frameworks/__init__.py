"""Frameworks as data: where each takes the knobs, one TOML file a framework and range of versions.

`driver` reads a file, `keys` finds the one of a command and compares the keys with the installed
version, `settings` reads and writes keys in a command, its file and its environment, `bound_driver`
applies a configuration. `training` reads what a command or its file trains, for a prediction, from
the `facts` and `sharding` that the same keys state.
"""

from tuner.workload.scripts.frameworks.driver import Driver, load_drivers, shipped_drivers

__all__ = ["Driver", "load_drivers", "shipped_drivers"]

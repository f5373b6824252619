"""Defaults of the command line that a user keeps in a file.

`$JOULEFRONT_CONFIG`, else `joulefront.toml` in `$XDG_CONFIG_HOME` (`~/.config`), holds any of the
names in `KEYS`. An option that is given wins, and so does an environment variable. Prices and the
grid's intensity are used by the objectives that need them.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName
from tuner.workload.runners import CLUSTER

#: Environment variable of the file.
CONFIG = "JOULEFRONT_CONFIG"
#: Names of the file, each with the kind of its value.
KEYS: dict[str, str] = {
    "runs_dir": "text",
    CLUSTER: "text",
    "price_per_kWh": "a number greater than 0",
    "price_per_gpu_hour": "a number greater than 0",
    "grid_gCO2_per_kWh": "a number greater than 0",
}
#: Values that only one objective takes.
_FOR_OBJECTIVE = {
    "price_per_kWh": "cost",
    "price_per_gpu_hour": "cost",
    "grid_gCO2_per_kWh": "carbon",
}


def config_file() -> Path:
    """Return the path of the file, which need not exist."""
    if named := os.environ.get(CONFIG):
        return Path(named)
    folder = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(folder) / "joulefront.toml"


def read_defaults() -> dict[str, Any]:
    """Return the defaults of the file; empty if there is none."""
    path = config_file()
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if CONFIG in os.environ:
            raise InputError(f"there is no file {path}, which ${CONFIG} names") from None
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    for name, value in found.items():
        if name not in KEYS:
            raise UnknownName("name", name, KEYS, where=f" in {path}")
        number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not (isinstance(value, str) if KEYS[name] == "text" else number):
            raise InvalidValue(f"{name} in {path}", value, KEYS[name])
    return found


def apply_defaults(args: argparse.Namespace, given: set[str]) -> None:
    """Fill in what the user did not say, from the file.

    Args:
        given: names of the arguments that an option or the environment set.
    """
    if not any(hasattr(args, name) for name in KEYS):
        return
    for name, value in read_defaults().items():
        if not hasattr(args, name) or name in given:
            continue
        if getattr(args, "objective", None) != _FOR_OBJECTIVE.get(name) and name in _FOR_OBJECTIVE:
            continue
        setattr(args, name, value)

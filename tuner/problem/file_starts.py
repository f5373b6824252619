"""What files make run: commands, imports and variables of knobs and drivers.

Files that joulefront includes are not listed: they are its own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from tuner.search_spaces.declared import Knob, load_pack, pack_names
from tuner.search_spaces.job import job_names, load_job
from tuner.workload.scripts.frameworks import Driver, load_drivers, shipped_drivers


def of_knobs(knobs: Sequence[Knob]) -> Iterator[str]:
    """Yield the variables of declared knobs, a phrase each."""
    for knob in knobs:
        if knob.target[0] == "env":
            values = ", ".join(str(level) for level in knob.levels if level is not None)
            yield f"{knob.name}: {knob.target[1]}={values}"


def of_driver(driver: Driver) -> Iterator[str]:
    """Yield what a driver that is not joulefront's own imports and sets, a phrase each."""
    if any(driver.table == own.table for own in shipped_drivers()):
        return
    for name, value in driver.quiet_env.items():
        yield f"{driver.name}: {name}={value}"
    if driver.wrapper is not None:
        modules = ", ".join(driver.wrapper.search)
        yield f"{driver.name}: imports {modules}, and calls a function of it"
    for knob, route in driver.knobs.items():
        if route.key.startswith("env:"):
            yield f"{driver.name}, {knob}: {route.key.removeprefix('env:')}=VALUE"
        settings = chain.from_iterable(level.items() for level in route.levels.values())
        for key, values in settings:
            for value in values:
                if key.startswith("env:") or str(value).startswith("call:"):
                    yield f"{driver.name}, {knob}: {key.removeprefix('env:')}={value}"
    yield from of_knobs(tuple(driver.declared.values()))


def of_files(knobs: Sequence[str], framework: Path | None, job: str | None) -> list[str]:
    """Return what files make run that a user names by --knobs and the like, a phrase each."""
    found: list[str] = []
    for given in knobs:
        if given not in (*pack_names(), "framework"):
            found += of_knobs(load_pack(given).knobs)
    if framework is not None:
        found += chain.from_iterable(map(of_driver, load_drivers(framework)))
    if job is not None and job not in job_names():
        found += of_knobs(load_job(job).knobs)
    return list(dict.fromkeys(found))

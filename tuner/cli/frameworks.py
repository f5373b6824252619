"""`tuner frameworks`: the drivers of frameworks, and a check of one."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any

from tuner.cli.options import OK, Commands, answer
from tuner.search_spaces.errors import InputError


def _frameworks(args: argparse.Namespace) -> int:
    if args.action == "check":
        return _check(args)
    if args.file is not None:
        raise InputError("tuner frameworks list takes no file; tuner frameworks check FILE does")
    from tuner.workload.scripts.frameworks import shipped_drivers

    drivers = shipped_drivers()
    lines = []
    for driver in drivers:
        named = ", ".join([*driver.knobs, *driver.declared])
        lines += [f"{driver.name} {driver.versions}".strip(), f"  {driver.what}"]
        lines += textwrap.wrap(named, 96, initial_indent="  knobs: ", subsequent_indent="    ")
    data = [
        {
            **{"framework": d.name, "versions": d.versions, "what": d.what},
            **{"knobs": list(d.knobs), "declared": list(d.declared), "keys": list(d.keys)},
        }
        for d in drivers
    ]
    answer(args, data, lines)
    return OK


def _check(args: argparse.Namespace) -> int:
    from tuner.workload.scripts.frameworks import load_driver
    from tuner.workload.scripts.frameworks.driver import check_version
    from tuner.workload.scripts.frameworks.keys import check_keys, search_path

    if args.file is None:
        raise InputError("tuner frameworks check needs the file of a driver")
    driver = load_driver(Path(args.file))
    found = check_keys(driver, search_path(Path.cwd(), ()))
    title = f"{driver.name} {found.version}".strip()
    lines = [f"{args.file} can be read: {len(driver.knobs)} knobs, {len(driver.keys)} keys"]
    if not driver.sources:
        lines.append(
            "no key is verified: the file has no [[keys]] that say where they are declared"
        )
    elif not found.files:
        lines.append(f"no key is verified: {driver.name} is not installed here")
    else:
        lines.append(f"{len(found.found)} keys are declared in the sources of {title}")
        lines += [f"{title} has no {key}" for key in found.gone]
    if found.version and driver.versions and not check_version(driver.versions, found.version):
        lines.append(f"the installed version is not in {driver.versions}")
    data: dict[str, Any] = {
        **{"framework": driver.name, "version": found.version, "found": list(found.found)},
        **{"gone": list(found.gone), "files": [str(path) for path in found.files]},
    }
    answer(args, data, lines)
    return 1 if found.gone else OK


def add(commands: Commands) -> None:
    """Add the command of this module."""
    command = commands.command(
        "frameworks", _frameworks, "list the frameworks whose knobs are known, or check a driver"
    )
    command.add_argument(
        "action",
        nargs="?",
        choices=("list", "check"),
        default="list",
        metavar="list|check",
        help="list the drivers, or check the one in FILE against what is installed (default: list)",
    )
    command.add_argument("file", nargs="?", metavar="FILE", help="TOML file of a driver")

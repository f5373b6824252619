"""`tuner dev frameworks check`: a check of the driver of a framework."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tuner.cli.options import OK, Commands, answer


def _check(args: argparse.Namespace) -> int:
    from tuner.workload.scripts.frameworks import load_driver
    from tuner.workload.scripts.frameworks.driver import check_version
    from tuner.workload.scripts.frameworks.keys import check_keys, search_path

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
        "frameworks", _check, "check the driver of a framework against what is installed"
    )
    command.add_argument("action", choices=("check",), metavar="check", help="the only action")
    command.add_argument("file", metavar="FILE", help="TOML file of a driver")

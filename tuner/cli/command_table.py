"""Socket of commands: the modules that add commands to `tuner`, in one table.

A provider is a module with `add(commands)`, which adds to the registry
`tuner.cli.parser.Commands`. Those of this package stand in `SHIPPED`, which is read without
importing them; another distribution brings one by an entry point of the group
`joulefront.commands`, named like its command. An extra that has been left out takes its commands
with it, and the others work without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuner.cli.parser import Commands
from tuner.search_spaces.plugins import Plugins, Socket, plugins_of, shipped_module

SOCKET = Socket("joulefront.commands", "command", 1, ("add",))


@dataclass(frozen=True)
class Provider:
    """A module of this package that adds commands.

    Attributes:
        extra: the extra that it belongs to; "" for the core.
    """

    module: str
    commands: tuple[str, ...]
    extra: str = ""


#: In the order of the reference (docs/cli.md).
SHIPPED = (
    Provider("tuner.cli.optimize", ("optimize",)),
    Provider("tuner.recordings.command", ("replay",), "replay"),
    Provider("tuner.planner.command", ("plan", "fit"), "planner"),
    Provider("tuner.simulated.demo", ("demo",), "simulated cluster"),
    Provider("tuner.cli.runs", ("show", "choose", "runs")),
    Provider("tuner.exchange", ("import", "export"), "exchange of runs"),
    Provider("tuner.comparison", ("compare", "explain"), "comparison"),
    Provider("tuner.dashboard", ("dashboard",), "dashboard"),
    Provider("tuner.deploy.command", ("apply",), "deployment"),
    Provider("tuner.cli.run", ("run",), "run"),
    Provider("tuner.doctor.catalog", ("list", "completion"), "doctor"),
    Provider("tuner.doctor.command", ("doctor", "dev"), "doctor"),
)


def add_commands(
    commands: Commands, shipped: Sequence[Provider] = SHIPPED, *, word: str = ""
) -> Plugins:
    """Add the commands of this package and of plug-ins; return the plug-ins.

    If `word` is a command of this package, its provider alone is imported, and the names of the
    others' commands stay theirs.
    """
    asked = [each for each in shipped if word in each.commands] or shipped
    commands.reserved.update(
        name for each in shipped if each not in asked for name in each.commands
    )
    for provider in asked:
        module: Any = (
            shipped_module(provider.module)
            if provider.extra
            else importlib.import_module(provider.module)
        )
        if module is None:
            commands.leave_out(provider.commands, provider.extra)
        else:
            module.add(commands)
    plugins = plugins_of(SOCKET, {name for each in shipped for name in each.commands})
    added, left_out = {}, [*plugins.left_out]
    for name, plugin in plugins.found.items():
        try:
            plugin.add(commands)
        except Exception as error:  # of another distribution: whatever it raises
            fault = f"its add() failed ({type(error).__name__}: {str(error)[:200]})"
            left_out.append(f"the command {name!r} is left out: {fault}")
        else:
            added[name] = plugin
    return Plugins(added, left_out)

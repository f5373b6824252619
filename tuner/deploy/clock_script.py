"""Shell script clocks.sh, which runs a command under a configuration's clocks.

It is a plain script over nvidia-smi, or over the kernel's files where cores are the devices, so
that it works where joulefront is not installed (`templates/clocks*.sh`). It restores the earlier
clocks when the command ends, fails or is interrupted (a trap), and a guard in a session of its own
restores them when the script itself is killed with SIGKILL. nvidia-smi reports an earlier power
limit but no earlier clock lock: a lock is released unless EARLIER_CLOCKS_MHZ gives the one to
restore. A GPU without persistence mode forgets its settings when no process uses it, for instance
between nvidia-smi and the command, so persistence mode is on for as long as the command runs
(NVIDIA, "Driver Persistence").
"""

from __future__ import annotations

from importlib import resources

from tuner.formatting import one_line
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.knobs import KNOBS, Value


def template(name: str) -> str:
    """Return a part of a shell script."""
    return (resources.files("tuner") / "templates" / name).read_text(encoding="utf-8")


def _array(value: Value | None) -> str:
    if value is None:
        return ""
    parts = value if isinstance(value, tuple) else (value,)
    return " ".join(f"{part:g}" if isinstance(part, float) else str(int(part)) for part in parts)


def clock_settings(configuration: Configuration) -> Settings:
    """Return the live settings that clocks.sh sets, without the knobs that the user declares."""
    live = configuration.live
    return Settings({name: value for name, value in live.items() if name in KNOBS})


def clocks_sh(configuration: Configuration, ranks_per_node: int, *, cores: bool = False) -> str:
    """Return the script of one configuration; without live settings it only runs the command."""
    live, script = clock_settings(configuration), template("clocks.sh")
    devices = template("clocks_of_cores.sh" if cores else "clocks_of_gpus.sh")
    setter, _, collect = devices.partition("@COLLECT@")
    words = {
        "@SETTER@": setter.strip(),
        "@COLLECT@": collect.strip(),
        "@ABOUT@": one_line(live.short) if live else "left to the device",
        "@CLOCKS@": _array(live.get("clock_MHz")),
        "@MEMORY@": _array(live.get("memory_clock_MHz")),
        "@LIMITS@": _array(live.get("power_limit_W")),
        "@RANKS@": str(configuration.world_size),
        "@PER_NODE@": str(ranks_per_node),
    }
    for name, value in words.items():
        script = script.replace(name, value)
    return script

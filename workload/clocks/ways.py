"""Ways to set the clocks of GPUs, in their order of preference.

1. The command of `--clock-command`, if there is one; then no other way is tried.
2. NVML itself: root, CAP_SYS_ADMIN.
3. Zeus's daemon, where ZEUSD_SOCK_PATH names its socket.
4. GEOPM's service, where its Python binding is installed.
5. Application clocks, where an administrator has permitted them to every user.

`sudo -n nvidia-smi` is a command of the first kind. It is not tried unasked, because a refused sudo
is reported to the administrator.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.workload.clocks.elsewhere import COMMAND, GeopmNvml, of_command
from tuner.workload.clocks.zeusd import SOCKET, ZeusdNvml

__all__ = ["Way", "earlier_lock", "ways"]

#: Environment variable with the lock that an administrator has set, MIN,MAX in MHz.
EARLIER = "EARLIER_CLOCKS_MHZ"


@dataclass(frozen=True)
class Way:
    """One way to set clocks.

    Attributes:
        means: its name.
        nvml: NVML with the setters of this way.
        guard: where the guard process finds the same.
        where: how a sentence calls it.
    """

    means: str
    nvml: Any
    guard: str
    where: str

    def why_not(self) -> str:
        """Return the reason why it cannot be tried; empty if it can."""
        try:
            return str(self.nvml.why_not()) if self.means != "locked clocks" else ""
        except self.nvml.NVMLError as error:
            return str(error)


def ways(nvml: Any, environ: Mapping[str, str]) -> Iterator[Way]:
    """Return the ways to lock clocks that this environment offers.

    Args:
        nvml: an initialised NVML.
        environ: the environment.

    Raises:
        InputError: the command of `--clock-command` cannot be read.
    """
    package = "tuner.workload.clocks"
    if environ.get(COMMAND):
        try:
            command = of_command(nvml, environ)
        except ValueError as error:
            named = f"--clock-command {environ[COMMAND]!r}"
            raise InputError(f"{named} is no command: {error}") from error
        yield Way(
            "command", command, f"{package}.elsewhere:of_command", f"the command {command.name!r}"
        )
        return
    yield Way("locked clocks", nvml, "pynvml", "NVML")
    if path := environ.get(SOCKET):
        daemon = ZeusdNvml(nvml, path, token=environ.get("ZEUSD_TOKEN", ""))
        yield Way("zeusd", daemon, f"{package}.zeusd:from_environment", f"zeusd at {path}")
    if importlib.util.find_spec("geopmdpy") is not None:
        yield Way("geopm", GeopmNvml(nvml), f"{package}.elsewhere:of_geopm", "GEOPM's service")


def earlier_lock(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the lock that the environment names; None if it names none.

    Raises:
        InvalidValue: it is no pair of clocks.
    """
    text = environ.get(EARLIER, "")
    if not text:
        return None
    low, comma, high = text.partition(",")
    if not (comma and low.strip().isdecimal() and high.strip().isdecimal()):
        raise InvalidValue(EARLIER, text, "MIN,MAX in MHz")
    return int(low), int(high)

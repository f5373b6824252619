"""NVML with its setters sent elsewhere: to a command, or to the service of GEOPM.

Each class replaces the NVML module for governor and guard: it queries NVML itself and sends the
setters to a program that may set what this user may not (`tuner.workload.clocks.ways` has the order
of preference; Zeus's daemon is in `tuner.workload.clocks.zeusd`).
"""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "COMMAND",
    "GEOPM_CONTROLS",
    "CommandNvml",
    "Elsewhere",
    "GeopmNvml",
    "SmiNvml",
    "of_command",
    "of_geopm",
]

#: Environment variable with the command that sets clocks (`--clock-command`).
COMMAND = "JOULEFRONT_CLOCK_COMMAND"
COMMAND_LIMIT_S = 30.0
#: The controls of GEOPM's service that are written.
GEOPM_CONTROLS = (
    "NVML::GPU_CORE_FREQUENCY_MAX_CONTROL",
    "NVML::GPU_CORE_FREQUENCY_MIN_CONTROL",
    "NVML::GPU_CORE_FREQUENCY_RESET_CONTROL",
    "NVML::GPU_POWER_LIMIT_CONTROL",
)
#: What a site's command is given as the clock to release the lock.
RELEASE = "reset"


class Elsewhere:
    """Substitute for the pynvml module: queries are NVML's, setters are those of a subclass.

    Args:
        nvml: the NVML that is asked.
    """

    name = "elsewhere"

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._nvml, name)
        return self._refuse if name.startswith(("nvmlDeviceSet", "nvmlDeviceReset")) else value

    def _refuse(self, *_: object) -> None:
        raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_SUPPORTED)

    def why_not(self) -> str:
        """Return the reason why this cannot be used here; empty if it may be tried."""
        return ""


class SmiNvml(Elsewhere):
    """Setters by a command that takes nvidia-smi's arguments, for instance "sudo -n nvidia-smi".

    Args:
        nvml: the NVML that is asked.
        words: the command.
    """

    def __init__(self, nvml: Any, words: Sequence[str]) -> None:
        super().__init__(nvml)
        self._words = list(words)
        self.name = " ".join(words)

    def why_not(self) -> str:
        """Return a phrase if the command does not exist; else an empty string."""
        return "" if shutil.which(self._words[0]) else f"there is no command {self._words[0]!r}"

    def _run(self, words: Sequence[str]) -> None:
        """Run a command without a terminal, so that it cannot ask for a password.

        Raises:
            NVMLError: it fails: NO_PERMISSION if it says so, else UNKNOWN.
        """
        nvml = self._nvml
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_LIMIT_S,
                start_new_session=True,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise nvml.NVMLError(nvml.NVML_ERROR_UNKNOWN) from error
        if done.returncode:
            said = (done.stdout + done.stderr).lower()
            denied = "permission" in said or "password" in said or "not allowed" in said
            code = nvml.NVML_ERROR_NO_PERMISSION if denied else nvml.NVML_ERROR_UNKNOWN
            raise nvml.NVMLError(code)

    def _smi(self, handle: Any, *words: str) -> None:
        uuid = self._nvml.nvmlDeviceGetUUID(handle)
        self._run([*self._words, "-i", uuid, *words])

    def nvmlDeviceSetPowerManagementLimit(self, handle: Any, limit_mW: int) -> None:
        """Set the power limit, milliwatts."""
        self._smi(handle, "-pl", f"{limit_mW / 1000:.2f}")

    def nvmlDeviceSetPersistenceMode(self, handle: Any, mode: int) -> None:
        """Turn persistence mode on or off."""
        self._smi(handle, "-pm", str(int(mode)))

    def nvmlDeviceSetGpuLockedClocks(self, handle: Any, low: int, high: int) -> None:
        """Lock the SM clock to a range, MHz."""
        self._smi(handle, "-lgc", f"{low},{high}")

    def nvmlDeviceResetGpuLockedClocks(self, handle: Any) -> None:
        """Release the SM clock's lock."""
        self._smi(handle, "-rgc")

    def nvmlDeviceSetMemoryLockedClocks(self, handle: Any, low: int, high: int) -> None:
        """Lock the memory clock to a range, MHz."""
        self._smi(handle, "-lmc", f"{low},{high}")

    def nvmlDeviceResetMemoryLockedClocks(self, handle: Any) -> None:
        """Release the memory clock's lock."""
        self._smi(handle, "-rmc")


class CommandNvml(SmiNvml):
    """SM clock by a command of the site's own, with placeholders.

    {clock} is the clock in MHz, or "reset" to release it; {gpu} is NVML's index of the GPU and
    {uuid} its UUID. Power limits and memory clocks cannot be set.
    """

    def _clock(self, handle: Any, clock: str) -> None:
        nvml = self._nvml
        places = {
            "{clock}": clock,
            "{gpu}": str(nvml.nvmlDeviceGetIndex(handle)),
            "{uuid}": str(nvml.nvmlDeviceGetUUID(handle)),
        }
        words = []
        for word in self._words:
            for place, value in places.items():
                word = word.replace(place, value)
            words.append(word)
        self._run(words)

    def nvmlDeviceSetGpuLockedClocks(self, handle: Any, low: int, high: int) -> None:
        """Set the SM clock, MHz."""
        self._clock(handle, str(high))

    def nvmlDeviceResetGpuLockedClocks(self, handle: Any) -> None:
        """Release the SM clock."""
        self._clock(handle, RELEASE)

    def _smi(self, handle: Any, *words: str) -> None:
        self._refuse()

    def nvmlDeviceSetPersistenceMode(self, handle: Any, mode: int) -> None:
        """Do nothing: only a clock that is set shows whether the command may set it."""


class GeopmNvml(Elsewhere):
    """Setters by the service of GEOPM, through its Python binding (geopmdpy.pio.write_control).

    Controls and units: geopm_pio_nvml(7). The service restores everything when the session of the
    process that wrote ends, and gives write access to one session at a time.

    Args:
        nvml: the NVML that is asked.
        pio: a stand-in for geopmdpy.pio.
    """

    name = "geopm"

    def __init__(self, nvml: Any, pio: Any = None) -> None:
        super().__init__(nvml)
        self._pio = pio

    def why_not(self) -> str:
        """Return the reason if the service does not permit clocks; else an empty string."""
        try:
            if self._pio is None:
                self._pio = importlib.import_module("geopmdpy.pio")
            offered = set(self._pio.control_names())
        except Exception as error:
            return f"geopmdpy cannot be used ({type(error).__name__}: {error})"
        missing = ", ".join(sorted(set(GEOPM_CONTROLS) - offered))
        return f"its access list does not have {missing}" if missing else ""

    def _write(self, handle: Any, control: str, value: float) -> None:
        nvml = self._nvml
        index = nvml.nvmlDeviceGetIndex(handle)
        try:
            self._pio.write_control(f"NVML::GPU_{control}_CONTROL", "gpu", index, value)
        except RuntimeError as error:
            raise nvml.NVMLError(nvml.NVML_ERROR_NO_PERMISSION) from error

    def nvmlDeviceSetPowerManagementLimit(self, handle: Any, limit_mW: int) -> None:
        """Set the power limit, milliwatts."""
        self._write(handle, "POWER_LIMIT", limit_mW / 1000)

    def nvmlDeviceSetGpuLockedClocks(self, handle: Any, low: int, high: int) -> None:
        """Lock the SM clock to a range, MHz, from its full range, so that the ends never cross."""
        self.nvmlDeviceResetGpuLockedClocks(handle)
        self._write(handle, "CORE_FREQUENCY_MAX", high * 1e6)
        self._write(handle, "CORE_FREQUENCY_MIN", low * 1e6)

    def nvmlDeviceResetGpuLockedClocks(self, handle: Any) -> None:
        """Release the SM clock's lock."""
        self._write(handle, "CORE_FREQUENCY_RESET", 0.0)


def of_command(nvml: Any = None, environ: Mapping[str, str] = os.environ) -> SmiNvml:
    """Return NVML with the command that the environment names; without {clock} as nvidia-smi's.

    Raises:
        ValueError: the command cannot be split into words, or is empty.
    """
    if nvml is None:
        import pynvml

        nvml = pynvml
    words = shlex.split(environ.get(COMMAND, ""))
    if not words:
        raise ValueError(f"{COMMAND} holds no command")
    kind = CommandNvml if any("{clock}" in word for word in words) else SmiNvml
    return kind(nvml, words)


def of_geopm() -> GeopmNvml:
    """Return the real NVML with GEOPM's service, for the guard."""
    import pynvml

    service = GeopmNvml(pynvml)
    if why := service.why_not():
        raise RuntimeError(why)
    return service

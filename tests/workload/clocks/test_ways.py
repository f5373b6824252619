"""Ways to set clocks without root: a command, GEOPM's service, and their order of preference."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.testing.fake_nvml import FakeGpu, FakeNVML
from tuner.testing.twin import TwinNode
from tuner.workload.clocks.elsewhere import COMMAND, GEOPM_CONTROLS, GeopmNvml
from tuner.workload.clocks.governor import NvmlGovernor
from tuner.workload.clocks.ways import ways


@pytest.fixture
def fake() -> FakeNVML:
    made = FakeNVML([FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")], root=False)
    made.nvmlInit()
    return made


class Tool:
    """A command that notes its arguments, and fails if it is told to."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.path = folder / "tool"
        self.refuse("")

    def refuse(self, sentence: str) -> None:
        ends = f"echo {sentence!r} >&2; exit 1" if sentence else "exit 0"
        self.path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {self.log}\n{ends}\n')
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def tool(tmp_path: Path) -> Tool:
    return Tool(tmp_path)


class TestCommand:
    def test_a_command_in_place_of_nvidia_smi_sets_all_and_restores(
        self, fake: FakeNVML, tool: Tool
    ) -> None:
        governor = NvmlGovernor(nvml=fake, environ={COMMAND: f"{tool.path} -n nvidia-smi"})
        assert (governor.can_set, governor.means) == (True, "command")
        assert tool.calls == [f"-n nvidia-smi -i GPU-{gpu} -pl 400.00" for gpu in "ab"]
        governor.apply(Settings(clock_MHz=(900, 1200)))
        assert tool.calls[2:] == [
            "-n nvidia-smi -i GPU-a -lgc 900,900",
            "-n nvidia-smi -i GPU-b -lgc 1200,1200",
        ]
        governor.close()
        assert tool.calls[4:] == [f"-n nvidia-smi -i GPU-{gpu} -rgc" for gpu in "ab"]

    def test_a_sites_own_command_gets_clock_and_gpu(self, fake: FakeNVML, tool: Tool) -> None:
        command = f"{tool.path} set --gpu={{gpu}} {{uuid}} {{clock}}"
        governor = NvmlGovernor(nvml=fake, environ={COMMAND: command})
        assert governor.can_set
        assert tool.calls == []  # nothing of a clock's may be set to find out
        governor.apply(Settings(clock_MHz=900))
        with pytest.raises(InputError, match="takes no limit"):
            governor.apply(Settings(power_limit_W=300))
        governor.close()
        set_to = ["set --gpu=0 GPU-a 900", "set --gpu=1 GPU-b 900"]
        assert tool.calls == [*set_to, *(call.replace("900", "reset") for call in set_to)]

    def test_a_clock_that_nvml_does_not_tell_is_said(self, fake: FakeNVML, tool: Tool) -> None:
        fake.fail("nvmlDeviceGetClockInfo", pynvml.NVML_ERROR_NOT_SUPPORTED)
        governor = NvmlGovernor(nvml=fake, environ={COMMAND: f"{tool.path} {{clock}}"})
        notes = governor.apply(Settings(clock_MHz=900)).notes
        assert notes == (
            "NVML does not tell the clock, so nothing shows that the command has set it",
        )
        governor.close()

    def test_a_refusal_is_no_permission_and_no_other_way_is_tried(
        self, fake: FakeNVML, tool: Tool
    ) -> None:
        tool.refuse("sudo: a password is required")
        governor = NvmlGovernor(
            nvml=fake, environ={COMMAND: str(tool.path), "ZEUSD_SOCK_PATH": "/nowhere"}
        )
        assert not governor.can_set
        assert "needs root" in governor.why_not
        assert "zeusd at" not in governor.why_not
        governor.close()

    @pytest.mark.parametrize("command", ["no-such-command -x", "'unclosed"])
    def test_no_command_is_one_sentence(self, fake: FakeNVML, command: str) -> None:
        try:
            governor = NvmlGovernor(nvml=fake, environ={COMMAND: command})
        except InputError as error:
            assert "is no command" in str(error)  # noqa: PT017 - either way it is one sentence
        else:
            assert "there is no command 'no-such-command'" in governor.why_not
            governor.close()

    def test_the_guard_of_a_killed_agent_uses_the_command(
        self, tool: Tool, twin_node: Callable[..., TwinNode]
    ) -> None:
        node = twin_node(root=False, virtual_time=False)
        agent = (
            "import os, time\n"
            "from tuner.search_spaces.configuration import Settings\n"
            "from tuner.workload.clocks.governor import NvmlGovernor\n"
            "governor = NvmlGovernor()\n"
            "governor.apply(Settings(clock_MHz=900))\n"
            "print('set', flush=True)\n"
            "time.sleep(600)\n"
        )
        environ = {**os.environ, **node.environment(), COMMAND: f"{tool.path} {{clock}}"}
        environ.pop("CUDA_VISIBLE_DEVICES", None)
        process = subprocess.Popen(
            [sys.executable, "-c", agent], env=environ, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "set\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        end_s = time.monotonic() + 30
        while tool.calls != ["900", "reset"] and time.monotonic() < end_s:
            time.sleep(0.02)
        assert tool.calls == ["900", "reset"]


class Pio:
    """The functions of geopmdpy.pio that are used (GEOPM 3.1), on the GPUs of a fake."""

    def __init__(self, fake: FakeNVML, offered: tuple[str, ...] = GEOPM_CONTROLS) -> None:
        self._fake, self._offered = fake, offered
        self._ends_MHz = dict.fromkeys(range(2), (210, 1410))

    def control_names(self) -> list[str]:
        return [*self._offered, "CPU_POWER_LIMIT_CONTROL"]

    def write_control(self, name: str, domain: str, index: int, setting: float) -> None:
        if name not in self._offered:
            raise RuntimeError("geopm_pio_write_control() failed: permission denied")
        assert domain == "gpu"
        handle = self._fake.nvmlDeviceGetHandleByIndex(index)
        low, high = self._ends_MHz[index]
        self._fake.permit(True)
        try:
            if name.endswith("RESET_CONTROL"):
                self._ends_MHz[index] = (210, 1410)
                self._fake.nvmlDeviceResetGpuLockedClocks(handle)
                return
            if name.endswith("POWER_LIMIT_CONTROL"):
                self._fake.nvmlDeviceSetPowerManagementLimit(handle, round(1000 * setting))
                return
            clock = round(setting / 1e6)
            ends = (clock, high) if "MIN" in name else (low, clock)
            assert ends[0] <= ends[1], "the ends cross"
            self._ends_MHz[index] = ends
            self._fake.nvmlDeviceSetGpuLockedClocks(handle, *ends)
        finally:
            self._fake.permit(False)


class TestGeopm:
    def governor(self, fake: FakeNVML, pio: Pio, monkeypatch: pytest.MonkeyPatch) -> NvmlGovernor:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "geopmdpy" or None)
        monkeypatch.setattr(
            "tuner.workload.clocks.ways.GeopmNvml", lambda nvml: GeopmNvml(nvml, pio)
        )
        return NvmlGovernor(nvml=fake, environ={})

    def test_sets_and_restores(self, fake: FakeNVML, monkeypatch: pytest.MonkeyPatch) -> None:
        governor = self.governor(fake, Pio(fake), monkeypatch)
        assert (governor.can_set, governor.means) == (True, "geopm")
        for clock in (900, 1410, 600):
            governor.apply(Settings(clock_MHz=clock))
            assert fake.locked_MHz(1) == (clock, clock)
        governor.apply(Settings(power_limit_W=250))
        assert fake.limit_W(0) == 250.0
        governor.close()
        assert (fake.locked_MHz(0), fake.limit_W(0)) == (None, 400.0)

    def test_what_the_access_list_lacks_is_named(
        self, fake: FakeNVML, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        governor = self.governor(fake, Pio(fake, GEOPM_CONTROLS[1:]), monkeypatch)
        assert not governor.can_set
        assert f"its access list does not have {GEOPM_CONTROLS[0]}" in governor.why_not
        governor.close()


def test_the_order_of_preference(fake: FakeNVML, monkeypatch: pytest.MonkeyPatch) -> None:
    def means(**environ: str) -> list[str]:
        return [way.means for way in ways(fake, environ)]

    assert means() == ["locked clocks"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert means(ZEUSD_SOCK_PATH="/run/zeusd.sock") == ["locked clocks", "zeusd", "geopm"]
    assert means(ZEUSD_SOCK_PATH="/run/zeusd.sock", **{COMMAND: "tool"}) == ["command"]

"""The twin's NVML: the ABI through unmodified pynvml, processes, faults, and its own physics.

Every figure of the GPU path that is tested on the twin rests on these.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.twin import TwinGpu, TwinNode

pytestmark = pytest.mark.needs("cc")
Make = Callable[..., TwinNode]
ROOT = Path(__file__).resolve().parents[2]


def opened(gpu: int = 0) -> Any:
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByIndex(gpu)


def instant_W(handle: Any, scope: int = 0) -> float:
    value = pynvml.nvmlDeviceGetFieldValues(handle, [(pynvml.NVML_FI_DEV_POWER_INSTANT, scope)])[0]
    if value.nvmlReturn:
        raise pynvml.NVMLError(value.nvmlReturn)
    return value.value.uiVal / 1000


def counter_J(handle: Any) -> float:
    return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000


def in_child(body: Callable[[], object]) -> str:
    """Run `body` in a forked child; return its result as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, str(body()).encode())
        except Exception as error:
            os.write(write, repr(error).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as answer:
        return answer.read()


def symbol_of(function: str) -> str:
    """Return the symbol of the library that a function of pynvml looks up."""
    body = (
        Path(pynvml.__file__).read_text().partition(f"\ndef {function}(")[2].partition("\ndef ")[0]
    )
    if found := re.search(r'_nvmlGetFunctionPointer\("(\w+)"\)', body):
        return found[1]
    forwarded = re.search(r"return (nvml\w+)\(", body)
    assert forwarded is not None, function
    return symbol_of(forwarded[1])


class TestAbi:
    def test_every_function_that_joulefront_calls_is_in_the_library(self, twin_node: Make) -> None:
        twin_node()
        opened()
        sources = [*(ROOT / "workload").rglob("*.py"), *(ROOT / "tuner" / "cli").rglob("*.py")]
        text = "".join(path.read_text() for path in sources)
        called = set(re.findall(r"\bnvml\.(nvml(?:Device|System)\w+)\(", text))
        asked = r"(?:gpu|self)\.(?:get|query)\(\s*(?:\w+,\s*)?\"([A-Z][a-z]\w+)\""  # of `Gpu`
        called |= {f"nvmlDeviceGet{what}" for what in re.findall(asked, text)}
        assert len(called) > 25
        for name in sorted(called):
            assert hasattr(pynvml.nvmlLib, symbol_of(name)), name

    def test_tells_what_the_devices_are(self, twin_node: Make) -> None:
        twin_node(
            TwinGpu(used_bytes=2**30, clock_MHz=(300, 600, 900), memory_MHz=(405, 1593)),
            TwinGpu(name="NVIDIA H100 80GB HBM3", uuid="GPU-h", compute=(9, 0), pci_bus=0xAB),
        )
        a100, h100 = opened(0), opened(1)
        assert pynvml.nvmlDeviceGetCount() == 2
        assert pynvml.nvmlDeviceGetName(h100) == "NVIDIA H100 80GB HBM3"
        assert pynvml.nvmlDeviceGetUUID(h100) == "GPU-h"
        assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID("GPU-h")) == 1
        bus = pynvml.nvmlDeviceGetPciInfo(h100).busId
        assert (bus, pynvml.nvmlDeviceGetPciInfo(h100).bus) == ("00000000:AB:00.0", 0xAB)
        for address in (bus, "0000:ab:00.0", "ab:00.0", "0:AB:0"):  # the documented forms
            assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByPciBusId(address)) == 1
        assert tuple(pynvml.nvmlDeviceGetCudaComputeCapability(h100)) == (9, 0)
        first = pynvml.nvmlDeviceGetMemoryInfo(a100)
        second = pynvml.nvmlDeviceGetMemoryInfo(a100, version=pynvml.nvmlMemory_v2)
        assert first.used == second.used + second.reserved
        assert second.used == 2**30
        assert first.free == second.free
        with pytest.raises(pynvml.NVMLError_ArgumentVersionMismatch):
            pynvml.nvmlDeviceGetMemoryInfo(a100, version=0x3000028)
        celsius = pynvml.nvmlDeviceGetTemperature(a100, 0)
        assert pynvml.nvmlDeviceGetTemperatureV(a100, 0) == celsius
        assert pynvml.nvmlDeviceGetSupportedMemoryClocks(a100) == [1593, 405]
        assert pynvml.nvmlDeviceGetSupportedGraphicsClocks(a100, 1593) == [900, 600, 300]
        assert pynvml.nvmlSystemGetCudaDriverVersion_v2() == 13000
        with pytest.raises(pynvml.NVMLError_NotFound):
            pynvml.nvmlDeviceGetHandleByUUID("GPU-none")
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            pynvml.nvmlDeviceGetHandleByIndex(2)

    def test_is_found_by_the_loader_in_another_process(self, tmp_path: Path) -> None:
        node = TwinNode(tmp_path / "node", [TwinGpu(), TwinGpu()], virtual_time=False)
        code = (
            "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount());"
            "pynvml.nvmlDeviceSetGpuLockedClocks(pynvml.nvmlDeviceGetHandleByIndex(1), 600, 600)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | node.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == ["2"]
        assert node.locked_MHz(1) == (600, 600)
        node.close()

    def test_without_a_state_file_there_is_no_nvml(self, twin_node: Make) -> None:
        node = twin_node()
        os.environ["JOULEFRONT_TWIN"] = str(node.path) + "-missing"
        with pytest.raises(pynvml.NVMLError_LibraryNotFound):
            pynvml.nvmlInit()


class TestProcesses:
    def test_a_forked_child_is_uninitialised_until_it_starts_nvml_itself(
        self, twin_node: Make
    ) -> None:
        twin_node()
        opened()
        assert "Uninitialized" in in_child(pynvml.nvmlDeviceGetCount)
        assert in_child(lambda: (pynvml.nvmlInit(), pynvml.nvmlDeviceGetCount())[1]) == "1"
        assert pynvml.nvmlDeviceGetCount() == 1

    def test_a_closed_descriptor_is_noticed_also_if_another_file_has_its_number(
        self, twin_node: Make
    ) -> None:
        node = twin_node()
        opened()

        pid = os.fork()
        if pid == 0:
            pynvml.nvmlInit()
            os.closerange(3, 256)
            for _ in range(3, 256):
                os.open(os.devnull, os.O_RDONLY)
            try:
                pynvml.nvmlDeviceGetCount()
            except pynvml.NVMLError as error:
                os._exit(error.value % 256)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == pynvml.NVML_ERROR_UNKNOWN % 256
        assert node.descriptor_losses == 1


class TestFaults:
    def test_setters_need_permission_and_leave_a_log(self, twin_node: Make) -> None:
        node = twin_node(root=False)
        handle = opened()
        with pytest.raises(pynvml.NVMLError_NoPermission):
            pynvml.nvmlDeviceSetGpuLockedClocks(handle, 900, 900)
        node.permit(True)
        pynvml.nvmlDeviceSetGpuLockedClocks(handle, 600, 900)
        pynvml.nvmlDeviceSetPowerManagementLimit(handle, 250_000)
        assert node.log == [
            ("nvmlDeviceSetGpuLockedClocks", 0, (600, 900)),
            ("nvmlDeviceSetPowerManagementLimit", 0, (250_000, 0)),
        ]
        assert (node.locked_MHz(), node.limit_W()) == ((600, 900), 250.0)
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            pynvml.nvmlDeviceSetPowerManagementLimit(handle, 900_000)

    def test_starting_nvml_and_each_call_take_their_time(self, twin_node: Make) -> None:
        slow = TwinGpu(persistence=False, start_s=2.0)
        node = twin_node(slow, slow, TwinGpu(), init_s=0.5, call_s=0.01)
        began_s = node.clock()
        opened()
        assert node.clock() - began_s == pytest.approx(4.51)
        pynvml.nvmlDeviceGetCount()
        assert node.clock() - began_s == pytest.approx(4.52)

    def test_settings_are_lost_with_the_last_client_unless_the_driver_persists(
        self, twin_node: Make
    ) -> None:
        node = twin_node(TwinGpu(persistence=False), TwinGpu(), TwinGpu(persistence=False))

        def lock() -> None:
            pynvml.nvmlInit()
            for gpu in range(3):
                handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
                pynvml.nvmlDeviceSetGpuLockedClocks(handle, 900, 900)
                pynvml.nvmlDeviceSetPowerManagementLimit(handle, 250_000)

        node.processes(2, compute=[(11, 2**30)])
        lock()
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()  # this process still holds it
        assert node.locked_MHz(0) == (900, 900)
        pynvml.nvmlShutdown()
        assert [node.locked_MHz(gpu) for gpu in range(3)] == [None, (900, 900), (900, 900)]
        assert [node.limit_W(gpu) for gpu in range(3)] == [400.0, 250.0, 250.0]
        node.processes(2)
        assert node.locked_MHz(2) is None
        in_child(lock)  # which ends without closing NVML
        assert [node.locked_MHz(gpu) for gpu in range(3)] == [None, (900, 900), None]


class TestPhysics:
    def test_energy_is_the_integral_of_power(self, twin_node: Make) -> None:
        node = twin_node(TwinGpu(heat_s=1.0, heat_K_per_W=0.15, leak_per_K=0.004))
        handle = opened()
        total_J, began_J = 0.0, node.energy_J()
        for number in range(4000):
            if number % 700 == 0:
                node.set(load=(number // 700 % 4) / 3)
            if number == 1500:
                pynvml.nvmlDeviceSetGpuLockedClocks(handle, 900, 900)
            if number == 2600:
                pynvml.nvmlDeviceSetPowerManagementLimit(handle, 150_000)
            node.sleep(0.001)
            total_J += 0.001 * node.power_W()
        assert node.energy_J() - began_J == pytest.approx(total_J, rel=1e-6)

    def test_the_counter_moves_in_steps_and_lags(self, twin_node: Make) -> None:
        spec = TwinGpu(counter_start_mJ=0, counter_delay_s=0.03, load=1.0)
        node = twin_node(spec)
        handle = opened()
        node.sleep(0.2)
        values = set()
        for _ in range(99):
            node.sleep(0.011)
            behind_J = node.energy_J() - counter_J(handle)
            assert 0.03 * 380 - 0.1 <= behind_J <= 0.13 * 380 + 0.1
            values.add(counter_J(handle))
        assert len(values) in (11, 12)

    def test_the_counter_keeps_what_a_tick_published_as_power_changes(
        self, twin_node: Make
    ) -> None:
        node = twin_node(TwinGpu(counter_start_mJ=0, load=1.0))
        handle = opened()
        for load in (0.0, 1.0):  # less than a step after the tick, and between two marks
            for until_s in (0.0998, 0.0004):
                node.sleep(until_s)
                published_J = counter_J(handle)
            node.set(load=load)
            node.sleep(0.0006)
            assert counter_J(handle) == published_J
            node.sleep(0.0992)

    def test_sensed_power_follows_the_true_one_with_its_time_constant(
        self, twin_node: Make
    ) -> None:
        node = twin_node(TwinGpu(filter_s=0.1))
        handle = opened()
        node.sleep(1.5)
        node.set(load=1.0)
        node.sleep(0.1)
        assert node.power_W() == pytest.approx(380.0)
        assert instant_W(handle) == pytest.approx(60 + 320 * (1 - 2.71828**-1), rel=0.01)
        node.sleep(0.4)
        averaged_W = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
        assert averaged_W == pytest.approx((0.6 * 60 + 0.4 * 380), rel=0.01)  # over 1 s, delayed

    def test_power_limit_and_heat_lower_the_clock_and_say_so(self, twin_node: Make) -> None:
        node = twin_node(TwinGpu(load=1.0, heat_s=0.5, heat_K_per_W=0.2))
        handle = opened()

        def state() -> tuple[int, int]:
            return (
                pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            )

        pynvml.nvmlDeviceSetPowerManagementLimit(handle, 250_000)
        node.sleep(0.1)
        clock, reasons = state()
        assert clock < 1410
        assert reasons & pynvml.nvmlClocksEventReasonSwPowerCap
        assert 240 < node.power_W() <= 250
        pynvml.nvmlDeviceSetPowerManagementLimit(handle, 400_000)
        node.sleep(10.0)
        assert node.temperature_C() == pytest.approx(85, abs=3)
        clock, reasons = state()
        assert clock < 1410
        assert reasons & pynvml.nvmlClocksEventReasonSwThermalSlowdown

    def test_a_change_of_clock_takes_its_latency(self, twin_node: Make) -> None:
        node = twin_node(TwinGpu(load=1.0, switch_s=0.2))
        handle = opened()
        pynvml.nvmlDeviceSetGpuLockedClocks(handle, 900, 900)
        before = node.clock_MHz_s()
        node.sleep(1.0)
        assert node.clock_MHz_s() - before == pytest.approx(0.2 * 1410 + 0.8 * 900, rel=0.01)

    def test_clocks_that_are_listed_and_never_reached(self, twin_node: Make) -> None:
        node = twin_node(TwinGpu(load=1.0, reach_MHz=1300))
        handle = opened()
        pynvml.nvmlDeviceSetGpuLockedClocks(handle, 1410, 1410)
        node.sleep(0.1)
        assert pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) == 1290
        assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle) == 0

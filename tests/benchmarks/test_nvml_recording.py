"""A recording of NVML: what it holds, what it leaves out, and that the twin answers as it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pynvml
import pytest

from benchmarks.gpu_hour.nvml_recording import COLUMNS, NvmlRecording, main, record_nvml
from tests.twin import TwinGpu, TwinNode
from tests.twin.replay import gpus_of, replayed_node
from tuner.search_spaces.errors import InputError
from tuner.workload.node.meters.gpus import Gpu, clock_state
from tuner.workload.node.meters.nvml import NvmlMeter

pytestmark = pytest.mark.needs("cc")
Make = Callable[..., TwinNode]

SUPERCHIP = TwinGpu(
    name="NVIDIA GH200 480GB",
    uuid="GPU-secret",
    compute=(9, 0),
    c2c=True,
    nvlinks=0,
    used_bytes=2**30,
    memory_MHz=(405, 2619),
    clock_MHz=tuple(range(345, 1981, 15)),
    idle_W=80.0,
    peak_W=500.0,
    limit_W=600.0,
    default_limit_W=700.0,
    max_limit_W=700.0,
    module_W=150.0,
    gpu_scope=0,
    counter_delay_s=0.05,
    filter_s=0.05,
)


def recorded(node: TwinNode, seconds: float, *, names: bool = False) -> NvmlRecording:
    return record_nvml(seconds, names=names, clock=node.clock, sleep=node.sleep)


def test_a_recording_holds_answers_errors_and_readings_and_no_names(twin_node: Make) -> None:
    node = twin_node(SUPERCHIP, TwinGpu(load=1.0), call_s=1e-5)
    node.fail("nvmlDeviceGetMigMode", pynvml.NVML_ERROR_UNKNOWN, gpu=1)
    node.processes(1, compute=[(4242, 2**20)])
    recording = recorded(node, 2.0)
    assert recording.system["nvmlSystemGetDriverVersion"] == "580.65.06"
    first, second = recording.devices
    assert first["nvmlDeviceGetName"] == "NVIDIA GH200 480GB"
    assert first["nvmlDeviceGetSupportedMemoryClocks"] == [2619, 405]
    assert second["nvmlDeviceGetMigMode"] == {"error": pynvml.NVML_ERROR_UNKNOWN}
    assert second["nvmlDeviceGetComputeRunningProcesses.bytes"] == [2**20]
    assert "secret" not in json.dumps(recording.devices)
    assert "4242" not in json.dumps(recording.devices)
    assert len(recording.rows[0]) == pytest.approx(200, abs=5)
    power = COLUMNS.index("instant_mW") + 1
    assert {row[power] for row in recording.rows[0]} == {None}  # not offered by this superchip
    assert recording.rows[1][-1][power] == pytest.approx(380e3, rel=0.01)
    assert recording.errors["0 power.instant 3"] == len(recording.rows[0])
    assert "failed with error 3" in "\n".join(recording.lines("x"))
    assert node.log == []  # nothing was set
    assert recorded(node, 0.1, names=True).devices[0]["nvmlDeviceGetUUID"] == "GPU-secret"


def test_the_twin_replays_a_recording(twin_node: Make, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    node = TwinNode(tmp_path / "their-node", [SUPERCHIP, TwinGpu()], call_s=1e-6)
    with node.joined():
        recording = _busy_recording(node)
        scope = _scope(node)
    recording.write(file)
    assert NvmlRecording.read(file) == recording

    again = twin_node(replay=file)
    handles = [pynvml.nvmlInit(), *(pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(2))][1:]
    assert pynvml.nvmlDeviceGetName(handles[0]) == "NVIDIA GH200 480GB"
    assert pynvml.nvmlDeviceGetUUID(handles[0]) == "GPU-recorded-0"
    counter, sm = COLUMNS.index("energy_mJ") + 1, COLUMNS.index("sm_MHz") + 1
    for row in recording.rows[1][20:180:40]:
        again.sleep(1000.0 + row[0] - again.clock() + 0.001)
        assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handles[1]) == row[counter]
        assert clock_state(Gpu(1, "x", "x", handles[1], pynvml))["clock_MHz"] == row[sm]
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetDefaultApplicationsClock(handles[0], pynvml.NVML_CLOCK_SM)
    assert _scope(again) == scope


def _busy_recording(node: TwinNode) -> NvmlRecording:
    """Record GPUs that begin to work after a second."""

    def sleep(seconds: float) -> None:
        node.sleep(seconds)
        node.set(load=float(node.clock() > 1001.0))

    return record_nvml(2.0, clock=node.clock, sleep=sleep)


def _scope(node: TwinNode) -> str:
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # the node has GPUs of two kinds
    meter = NvmlMeter(
        environ={**order, "CUDA_VISIBLE_DEVICES": "0"}, clock=node.clock, sleep=node.sleep
    )
    try:
        return meter.info.scope
    finally:
        meter.close()


def test_a_meter_reads_the_recorded_energy(twin_node: Make, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    node = TwinNode(tmp_path / "their-node", [TwinGpu(load=1.0)])
    with node.joined():
        recorded(node, 4.0).write(file)
    again = twin_node(replay=file)
    meter = NvmlMeter(environ={}, clock=again.clock, sleep=again.sleep)
    try:
        opened = meter.boundary(opens=True)
        again.sleep(9.0)  # twice around: the counter goes on
        closed = meter.boundary(opens=False)
    finally:
        meter.close()
    power_W = (closed.energy_J - opened.energy_J) / (closed.time_s - opened.time_s)
    assert power_W == pytest.approx(380.0, rel=0.02)


def test_gpus_are_described_as_recorded(twin_node: Make) -> None:
    node = twin_node(SUPERCHIP)
    (gpu,) = gpus_of(recorded(node, 0.1))
    for name in ("clock_MHz", "memory_MHz", "memory_bytes", "used_bytes", "c2c", "compute"):
        assert getattr(gpu, name) == getattr(SUPERCHIP, name), name
    assert (gpu.limit_W, gpu.default_limit_W, gpu.max_limit_W) == (600.0, 700.0, 700.0)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"version": "0"}')
    (tmp_path / "text").write_text("nvidia-smi")
    for name in ("old.json", "text", "missing"):
        with pytest.raises(InputError, match=name):
            replayed_node(tmp_path / "node", tmp_path / name)


def test_the_command_records(
    twin_node: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin_node(TwinGpu(), virtual_time=False)
    file = tmp_path / "nvml.json"
    assert main([str(file), "--seconds", "1"]) == 0
    assert "recorded 1 GPUs" in capsys.readouterr().out
    assert len(NvmlRecording.read(file).rows[0]) > 5


@pytest.mark.parametrize("seconds", ["0", "nan", "-1", "inf"])
def test_a_recording_without_a_length_is_refused(
    seconds: str, twin_node: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin_node(TwinGpu())
    file = tmp_path / "nvml.json"
    assert main([str(file), "--seconds", seconds]) == 2
    assert "give a positive length" in capsys.readouterr().err
    assert not file.exists()


def test_without_a_driver_nothing_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr(pynvml, "nvmlInit", Mock(side_effect=missing))
    assert main([str(tmp_path / "nvml.json")]) == 2
    assert "nothing was recorded: NVML does not start" in capsys.readouterr().err

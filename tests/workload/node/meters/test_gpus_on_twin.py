"""GPUs that cannot be opened take nothing from the others, and NVML that fails is never no GPU."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from benchmarks.figures import ROOT
from tests.twin import TwinGpu, TwinNode
from tuner.cli.main import main
from tuner.search_spaces.errors import InputError
from tuner.study.request import device_elsewhere
from tuner.workload.node.facts import inspect_node
from tuner.workload.node.meters.base import MeterError, NoDriver
from tuner.workload.node.meters.gpus import (
    cuda_numbering,
    open_nvml,
    unusable_gpus,
    visible_gpus,
    why_not_binding,
)
from tuner.workload.node.platforms import detect_cluster

pytestmark = pytest.mark.needs("cc")
Make = Callable[..., TwinNode]
HIDDEN = {"open_error": pynvml.NVML_ERROR_NO_PERMISSION}
LOST = {"lost": 1}


def node_of(make: Make, count: int, broken: dict[int, dict[str, int]]) -> TwinNode:
    node = make(*(TwinGpu(uuid=f"GPU-{index}") for index in range(count)))
    for index, state in broken.items():
        node.set(index, **state)
    return node


def seen(environ: dict[str, str]) -> list[int]:
    nvml = open_nvml()
    try:
        return [gpu.index for gpu in visible_gpus(nvml, environ=environ)]
    finally:
        nvml.nvmlShutdown()


@pytest.mark.parametrize(
    ("count", "broken", "named", "indices", "numbers"),
    [
        (4, {2: HIDDEN}, None, [0, 1, 3], None),
        (4, {2: HIDDEN}, "0,1", [0, 1], "0,1"),
        (4, {0: HIDDEN, 1: HIDDEN}, "0,1", [2, 3], "0,1"),  # Slurm counts what the job may open
        (4, {0: HIDDEN}, "GPU-3,GPU-1", [3, 1], "2,0"),
        (8, {3: LOST}, "0,1,2", [0, 1, 2], "0,1,2"),
        (*(8, {3: LOST}, None, [0, 1, 2, 4, 5, 6, 7]), "GPU-0,GPU-1,GPU-2,GPU-4,GPU-5,GPU-6,GPU-7"),
        (4, {3: LOST}, None, [0, 1, 2], None),  # all of those used are before it
        (8, {3: LOST}, "GPU-2,GPU-5", [2, 5], "GPU-2,GPU-5"),
        (4, {1: {"open_error": pynvml.NVML_ERROR_UNINITIALIZED}}, "0", [0], "0"),
        (2, {0: HIDDEN, 1: HIDDEN}, "", [], ""),
    ],
)
def test_a_gpu_that_cannot_be_opened_is_left_out(
    twin_node: Make,
    count: int,
    broken: dict[int, dict[str, int]],
    named: str | None,
    indices: list[int],
    numbers: str | None,
) -> None:
    node_of(twin_node, count, broken)
    environ = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    assert seen(environ) == indices
    assert cuda_numbering(environ).get("CUDA_VISIBLE_DEVICES") == numbers
    cluster = detect_cluster(environ=environ)
    expected = ("cuda", len(indices)) if indices else ("cpu", cluster.devices_per_node)
    assert (cluster.device.type, cluster.devices_per_node) == expected


@pytest.mark.parametrize(
    ("named", "broken", "says"),
    [
        ("3", {3: LOST}, "'3', which names no GPU or MIG slice .* 3 of NVML: GPU is lost"),
        ("1", {1: LOST}, "GPU 1 cannot be used .GPU is lost.*name GPUs by UUID"),
        ("0,2", {1: LOST}, "'2', but GPU 1 cannot be used|names no GPU"),
        ("GPU-1", {1: HIDDEN}, "'GPU-1', which names no GPU .*Insufficient Permissions"),
        ("9", {}, "'9', which names no GPU or MIG slice of this machine: 0 = GPU-0, 1 = GPU-1"),
        (None, dict.fromkeys(range(4), HIDDEN), "NVML opens no GPU: GPU 0 of NVML: Insufficient"),
        (None, dict.fromkeys(range(4), LOST), "NVML opens no GPU: GPU 0 of NVML: GPU is lost"),
    ],
)
def test_what_names_a_broken_gpu_is_one_sentence_and_exit_2(
    twin_node: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    named: str | None,
    broken: dict[int, dict[str, int]],
    says: str,
) -> None:
    node_of(twin_node, 4, broken)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    with pytest.raises(InputError, match=says):
        detect_cluster()
    assert main(["dev", "probe", "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tuner: ")


def test_doctor_notes_a_broken_gpu(twin_node: Make) -> None:
    node_of(twin_node, 3, {1: LOST})
    nvml = open_nvml()
    assert unusable_gpus(nvml) == {1: "GPU is lost"}
    nvml.nvmlShutdown()
    facts = inspect_node(environ={})
    assert [gpu.index for gpu in facts.gpus] == [0, 2]
    assert "GPU 1 cannot be used: GPU is lost" in facts.notes


class TestNvmlThatDoesNotStart:
    """It turned a node of GPUs into a CPU study."""

    @pytest.mark.parametrize(
        ("code", "says"),
        [
            (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "mismatch; reboot, or reload the driver"),
            (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error"),
            (pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"),
        ],
    )
    def test_is_an_error(
        self,
        twin_node: Make,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
        code: int,
        says: str,
    ) -> None:
        twin_node(TwinGpu(), TwinGpu()).fail("nvmlInit", code)
        with pytest.raises(InputError, match=says):
            detect_cluster()
        facts = inspect_node()
        assert facts.kind == ""
        assert says in facts.refusals()[0]
        (tmp_path / "train.py").write_text("")
        assert main(["optimize", "--quiet", "--", "python", str(tmp_path / "train.py")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line
        assert "--cluster cpu-2" in line
        assert not inspect_node().ready

    def test_unless_cores_are_asked_for(
        self, twin_node: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        twin_node().fail("nvmlInit", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        assert device_elsewhere("cpu-2") is None
        for hidden in ("", "-1", "NoDevFiles"):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
            assert not detect_cluster().device.is_gpu

    @pytest.mark.parametrize(
        "code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED]
    )
    def test_no_driver_is_no_gpu_unless_there_is_its_file(
        self, twin_node: Make, tmp_path: Path, code: int
    ) -> None:
        """A container without the driver's library may still have the GPU's file."""
        twin_node().fail("nvmlInit", code)
        with pytest.raises(NoDriver, match=r"^NVML does not start: [^;]*$"):  # no container's fault
            open_nvml(dev=tmp_path)
        assert not detect_cluster(dev=tmp_path, environ={}).device.is_gpu
        (tmp_path / "nvidiactl").touch()
        assert not detect_cluster(dev=tmp_path, environ={}).device.is_gpu
        (tmp_path / "nvidia3").touch()
        with pytest.raises(InputError, match="GPUs of this machine cannot be asked") as found:
            detect_cluster(dev=tmp_path, environ={})
        remedy = "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        assert (remedy in str(found.value)) == (code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def test_an_absent_binding_is_no_gpu_either(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        with pytest.raises(NoDriver, match="nvidia-ml-py is not installed"):
            open_nvml(dev=tmp_path)
        (tmp_path / "nvidia0").touch()
        with pytest.raises(MeterError) as found:
            open_nvml(dev=tmp_path)
        assert not isinstance(found.value, NoDriver)


@pytest.mark.parametrize("gone", ["nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"])
def test_temperature_is_read_by_the_call_that_the_driver_has(
    twin_node: Make, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """CUDA 14 removes nvmlDeviceGetTemperature."""
    twin_node(TwinGpu(ambient_C=41.0))
    nvml = open_nvml()
    (gpu,) = visible_gpus(nvml)
    whole = pynvml._nvmlGetFunctionPointer

    def found(name: str) -> Any:
        if name == gone:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return whole(name)

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", found)
    assert gpu.temperature_C() >= 41.0


def test_nodes_under_other_power_profiles_are_of_another_kind(twin_node: Make) -> None:
    """Under Max-Q a GPU has other clocks and powers under the same settings."""
    node = twin_node(TwinGpu(power_profiles=0), TwinGpu(power_profiles=0))
    plain = inspect_node().kind
    assert plain == "A100-SXM-80GB"
    node.set(power_profiles=1 << pynvml.NVML_POWER_PROFILE_MAX_Q)
    assert inspect_node().kind == f"{plain} (MAX_Q)"
    assert device_elsewhere(detect_cluster()) is None
    node.set(0, power_profiles=0)
    (sentence,) = inspect_node().refusals()
    assert "different GPUs" in sentence
    assert "(MAX_Q)" in sentence


# ---- the Python binding


class Binding:
    """Module named pynvml of another package, or of another release."""

    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)


class Record32(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("pid", "used", "instances", "more")]


@pytest.mark.parametrize(
    ("binding", "sentence"),
    [
        (Binding(nvmlInit=lambda: None), "pip uninstall -y pynvml nvidia-ml-py3"),
        (
            Binding(nvmlDeviceSetGpuLockedClocks=len, c_nvmlProcessInfo_v3_t=Record32),
            "pip install --upgrade nvidia-ml-py",
        ),
        (Binding(nvmlDeviceSetGpuLockedClocks=len), ""),  # an older release, without that record
        (pynvml, ""),
    ],
)
def test_another_binding_is_one_sentence(
    binding: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sentence in why_not_binding(binding)
    assert bool(why_not_binding(binding)) == bool(sentence)
    if sentence:
        monkeypatch.setitem(sys.modules, "pynvml", binding)
        with pytest.raises(MeterError, match="nvidia-ml-py"):
            open_nvml()


def test_the_declared_bound_is_a_release_that_reads_processes() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (bound,) = re.findall(r'"nvidia-ml-py>=([0-9.]+)"', text)
    assert tuple(map(int, bound.split("."))) >= (12, 535, 108)

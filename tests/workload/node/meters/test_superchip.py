"""The meter of Grace superchips on a made-up sysfs, beside twin GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.twin import TwinGpu, TwinNode
from tuner.workload.node.meters.base import SOCKET, MeterError
from tuner.workload.node.meters.nvml import NvmlMeter
from tuner.workload.node.meters.superchip import SuperchipMeter, channels
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.platforms.nvidia import Nvidia

pytestmark = pytest.mark.needs("cc")
Make = Callable[..., TwinNode]
GPU = TwinGpu(name="NVIDIA GH200 480GB", c2c=True)
#: What a module draws besides its GPU, and the parts of it that have channels, watts.
BESIDE_W, GRACE_W, CPU_W, SYSIO_W = 120.0, 90.0, 60.0, 20.0


class Sysfs:
    """Folder of hwmon with the channels of superchips, whose power follows twin GPUs."""

    def __init__(self, root: Path, node: TwinNode, sockets: int, each: int = 1) -> None:
        self.root, self._node, self.stalled = root, node, False
        self._each = each
        self._sockets, self._written = sockets, dict[Path, str]()
        for socket in range(sockets):
            for number, part in enumerate(("Module", "Grace", "CPU", "SysIO")):
                folder = root / f"hwmon{4 * socket + number}"
                folder.mkdir(parents=True)
                (folder / "power1_oem_info").write_text(f"{part} Power Socket {socket}\n")
        other = root / "hwmon99"  # a fan's, a drive's
        other.mkdir()
        (other / "name").write_text("nvme\n")
        self.update()

    def file(self, socket: int, part: int = 0) -> Path:
        return self.root / f"hwmon{4 * socket + part}" / "power1_average"

    def update(self) -> None:
        """Write what each channel draws now."""
        for socket in range(self._sockets if not self.stalled else 0):
            gpus = range(socket * self._each, (socket + 1) * self._each)
            gpu_W = sum(self._node.power_W(gpu) for gpu in gpus)
            for part, power_W in enumerate((gpu_W + BESIDE_W, GRACE_W, CPU_W, SYSIO_W)):
                file, text = self.file(socket, part), f"{round(1e6 * power_W)}\n"
                if self._written.get(file) != text:
                    file.write_text(text)
                    self._written[file] = text

    def sleep(self, seconds: float) -> None:
        """Let time pass; the channels are updated every 10 ms."""
        until_s = self._node.clock() + seconds
        while self._node.clock() < until_s - 1e-9:
            self._node.sleep(min(0.01, until_s - self._node.clock()))
            self.update()


@contextmanager
def metered(
    make: Make, root: Path, each: int = 1
) -> Iterator[tuple[TwinNode, Sysfs, SuperchipMeter]]:
    """Yield a node of two modules."""
    gpus = 2 * each
    node = make(*(GPU,) * gpus)
    sysfs = Sysfs(root, node, 2, each)
    inner = NvmlMeter(environ={}, clock=node.clock, sleep=sysfs.sleep)
    times = {"clock": node.clock, "sleep": sysfs.sleep}
    made = SuperchipMeter(inner, gpus, each=each, root=root, sample_period_s=3600.0, **times)
    with closing(made) as meter:
        yield node, sysfs, meter


def worked(
    node: TwinNode, sysfs: Sysfs, meter: SuperchipMeter, seconds: float
) -> tuple[float, float]:
    """Return (measured, true) joules of a window of work."""
    opened, before_J = meter.boundary(opens=True), node.energy_J()
    began_s = node.clock()
    node.set(load=1.0)
    for _ in range(round(seconds / 0.05)):
        sysfs.sleep(0.05)
        meter.read()  # as the ticker does
    node.set(load=0.0)
    true_J = node.energy_J() - before_J + 2 * BESIDE_W * (node.clock() - began_s)
    return meter.boundary(opens=False).energy_J - opened.energy_J, true_J


@pytest.mark.parametrize("each", [1, 2])
def test_energy_is_the_modules_to_half_a_per_cent(
    twin_node: Make, tmp_path: Path, each: int
) -> None:
    with metered(twin_node, tmp_path, each) as (node, sysfs, meter):
        assert (meter.info.scope, meter.info.name) == ("module", "superchip")
        measured_J, true_J = worked(node, sysfs, meter, 5.0)
        assert measured_J == pytest.approx(true_J, rel=0.005)


def test_the_parts_stand_beside_and_are_not_added(twin_node: Make, tmp_path: Path) -> None:
    with metered(twin_node, tmp_path) as (node, sysfs, meter):
        node.set(load=1.0)
        sysfs.sleep(1.0)
        sample = meter.sample()
        assert sample.power_W == pytest.approx(sample.extra["gpu_W"] + 2 * BESIDE_W, rel=0.01)
        assert sample.extra["grace_W"] == 2 * GRACE_W
        assert sample.extra["cpu_W"] == 2 * CPU_W
        assert sample.extra["sysio_W"] == 2 * SYSIO_W
        assert sample.extra["clock_MHz"] == 1410  # the GPUs' clocks, as before


def test_a_sensor_that_stands_still_is_noticed(twin_node: Make, tmp_path: Path) -> None:
    with metered(twin_node, tmp_path) as (node, sysfs, meter):
        worked(node, sysfs, meter, 3.0)
        sysfs.stalled = True  # at idle power
        with pytest.raises(MeterError, match="a sensor under hwmon stands still"):
            worked(node, sysfs, meter, 5.0)
        with pytest.raises(MeterError, match="stands still"):
            meter.read()  # its joules are lost


@pytest.mark.parametrize("what", ["vanishes", "is no number"])
def test_a_sensor_that_goes_away_is_an_error_and_no_zero(
    twin_node: Make, tmp_path: Path, what: str
) -> None:
    with metered(twin_node, tmp_path) as (_, sysfs, meter):
        sysfs.stalled = True
        sysfs.file(1).unlink() if what == "vanishes" else sysfs.file(1).write_text("N/A\n")
        with pytest.raises(MeterError, match="cannot be read as a power"):
            meter.read()
        with pytest.raises(MeterError):
            meter.sample()


def test_modules_of_other_sockets_are_not_charged(twin_node: Make, tmp_path: Path) -> None:
    """With one of two GPUs visible, the other's module is somebody else's."""
    node = twin_node(GPU, GPU)
    Sysfs(tmp_path / "class" / "hwmon", node, 2)
    environ = {"CUDA_VISIBLE_DEVICES": "1"}
    platform = Nvidia(environ, sys=tmp_path)
    with closing(platform.open_meter(detect_cluster(environ=environ))) as meter:
        assert (meter.info.name, meter.info.scope) == ("nvml", "gpu")


@pytest.mark.parametrize(
    ("visible", "name"), [("0,1,2,3", "superchip"), ("0,1", "nvml"), ("0,2", "nvml"), ("0", "nvml")]
)
def test_two_modules_of_four_gpus_are_charged_if_all_are_visible(
    twin_node: Make, tmp_path: Path, visible: str, name: str
) -> None:
    """A tray of GB200: with two GPUs visible, a module may hold one of each, or both."""
    gpu = TwinGpu(name="NVIDIA GB200", c2c=True, compute=(10, 0))
    node = twin_node(*(gpu,) * 4, virtual_time=False)
    Sysfs(tmp_path / "class" / "hwmon", node, 2, 2)
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    platform = Nvidia(environ, sys=tmp_path)
    with closing(platform.open_meter(detect_cluster(environ=environ))) as meter:
        assert meter.info.name == name
        assert ("of 2 superchips," in meter.info.source) == (name == "superchip")


def test_a_superchip_is_metered_by_its_modules_and_another_node_by_nvml(
    twin_node: Make, tmp_path: Path
) -> None:
    node = twin_node(GPU)
    Sysfs(tmp_path / "class" / "hwmon", node, 1)
    for root, name in ((tmp_path, "superchip"), (tmp_path / "elsewhere", "nvml")):
        with closing(Nvidia({}, sys=root).open_meter(detect_cluster(environ={}))) as meter:
            assert meter.info.name == name
            assert meter.info.tells_clocks
    assert len(channels(tmp_path / "class" / "hwmon")) == 4


def test_without_its_meter_a_superchip_is_metered_by_nvml(
    twin_node: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Sysfs(tmp_path / "class" / "hwmon", twin_node(GPU), 1)
    monkeypatch.setitem(sys.modules, SOCKET.shipped["superchip"], None)
    assert list(Nvidia({}, sys=tmp_path).meters(detect_cluster(environ={}))) == ["nvml"]

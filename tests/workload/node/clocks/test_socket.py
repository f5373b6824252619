"""The socket of clocks: governors follow the contract, and other distributions bring a way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.entry_points import install_plugin
from tests.support.sysfs import make_sysfs, settings_of
from tests.twin import TwinGpu, TwinNode
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.testing.clocks import GovernorContract
from tuner.workload.node.clocks import clock_backends
from tuner.workload.node.clocks.base import SOCKET
from tuner.workload.node.clocks.clock_backends import NVML_MEANS
from tuner.workload.node.clocks.cpu import CpuGovernor
from tuner.workload.node.clocks.governor import NvmlGovernor
from tuner.workload.node.facts import inspect_node
from tuner.workload.node.platforms.base import Host, missing_clocks
from tuner.workload.node.platforms.cores import Cores

GROUP = "joulefront.clocks"
#: A daemon of a site, which sets for everybody.
PLUGIN = """
from tuner.workload.node.clocks.clock_backends import ClockBackend, NvmlProxy

PROTOCOL = 1

class Daemon(NvmlProxy):
    def _change(self, verb, setting, uuid, values):
        handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        getattr(self._nvml, f"nvmlDevice{verb}{setting}")(handle, *values)

def backend(nvml, gpu, environ):
    if "SITE_DAEMON" not in environ:
        return None
    return ClockBackend("site", Daemon(nvml), "", "the site's daemon", lambda: "")
"""


class TestCores(GovernorContract):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = make_sysfs(tmp_path / "sys")

    def open_governor(self) -> CpuGovernor:
        return CpuGovernor(self.root, cpus=range(4), guarded=False)

    def state(self) -> Any:
        return settings_of(self.root)


@pytest.mark.needs("cc")
class TestNvml(GovernorContract):
    environ: ClassVar[dict[str, str]] = {}

    @pytest.fixture(autouse=True)
    def _node(self, twin_node: Callable[..., TwinNode]) -> None:
        self.node = twin_node(TwinGpu(load=1.0), TwinGpu(load=1.0))

    def open_governor(self) -> NvmlGovernor:
        return NvmlGovernor(environ=self.environ, guarded=False)

    def state(self) -> Any:
        return [(self.node.locked_MHz(gpu), self.node.limit_W(gpu)) for gpu in range(2)]


class TestPlugin(TestNvml):
    environ: ClassVar[dict[str, str]] = {"SITE_DAEMON": "yes"}

    @pytest.fixture(autouse=True)
    def _installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _node: None) -> None:
        install_plugin(tmp_path, monkeypatch, GROUP, "site", PLUGIN)
        # NVML itself permits nothing to this process; the twin's driver does.
        monkeypatch.setattr(clock_backends, "has_right", lambda: False)

    def test_it_is_the_way(self, governor: NvmlGovernor) -> None:
        assert governor.means == "site"


@pytest.mark.needs("cc")
@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("site", "raise RuntimeError('no socket')", "cannot be loaded (RuntimeError: no socket)"),
        ("site", PLUGIN.replace("PROTOCOL = 1", "PROTOCOL = 3"), "must have PROTOCOL = 1, not 3"),
        ("site", "PROTOCOL = 1", "must have backend()"),
        ("guard", PLUGIN, "the name 'guard' is taken"),
    ],
)
def test_a_way_that_cannot_be_used_is_one_sentence_of_doctor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    twin_node: Callable[..., TwinNode],
    name: str,
    source: str,
    fault: str,
) -> None:
    twin_node(TwinGpu())
    install_plugin(tmp_path, monkeypatch, GROUP, name, source)
    (note,) = (note for note in inspect_node(environ={}).notes if "is left out" in note)
    assert note.startswith(f"the way to set clocks {name!r} (")
    assert fault in note
    with closing(NvmlGovernor(environ={}, guarded=False)) as governor:
        assert governor.means == "locked clocks"  # the core goes on without it
        governor.apply(Settings(clock_MHz=900))


@pytest.mark.needs("cc")
def test_a_way_that_fails_when_asked_is_a_reason_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, twin_node: Callable[..., TwinNode]
) -> None:
    twin_node(TwinGpu(), root=False)
    source = "PROTOCOL = 1\ndef backend(nvml, gpu, environ): raise OSError('daemon is gone')\n"
    install_plugin(tmp_path, monkeypatch, GROUP, "site", source)
    with closing(NvmlGovernor(environ={}, guarded=False)) as governor:
        assert not governor.can_set
        assert "the plug-in 'site' does not do it either" in governor.why_not
        assert "OSError: daemon is gone" in governor.why_not


@pytest.mark.parametrize("name", ["zeusd", "guard"])
def test_a_shipped_way_follows_the_protocol_of_plugins(name: str) -> None:
    assert SOCKET.check(SOCKET.part(name)) == ""


@pytest.fixture
def core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without any shipped way but NVML."""
    for name in ("zeusd", "guard", "cores"):
        module = SOCKET.shipped[name].partition(":")[0]
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.usefixtures("core_alone")
@pytest.mark.needs("cc")
def test_without_the_shipped_ways_nvml_sets_and_puts_back(
    twin_node: Callable[..., TwinNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = twin_node(TwinGpu(), virtual_time=False, children=True)
    with closing(NvmlGovernor(environ={"ZEUSD_SOCK_PATH": "/run/zeusd.sock"})) as governor:
        assert governor.means == NVML_MEANS
        governor.apply(Settings(clock_MHz=900))
        assert node.locked_MHz() is not None
    assert node.locked_MHz() is None
    monkeypatch.setattr(clock_backends, "has_right", lambda: False)
    with closing(NvmlGovernor(environ={})) as governor:
        assert not governor.can_set
        assert "an administrator fix the clock with: nvidia-smi -i 0" in governor.why_not
    assert missing_clocks({}).lines == ()


@pytest.mark.usefixtures("core_alone")
def test_without_their_governor_the_clocks_of_cores_stay(tmp_path: Path) -> None:
    cores = Cores({}, sys=make_sysfs(tmp_path / "sys"))
    cluster = cores.cluster(Host(2**34, 4))
    assert not cluster.clock_control
    assert not cores.clocks().can_set
    with closing(cores.open_governor(cluster)) as governor:
        assert "not installed here" in governor.why_not
        with pytest.raises(InputError, match="install all parts"):
            governor.apply(Settings(clock_MHz=2000))

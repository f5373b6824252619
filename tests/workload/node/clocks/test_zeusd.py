"""Zeus's daemon as the way to set clocks: its protocol, frozen from its route tables."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pynvml
import pytest

from tests.twin import TwinGpu, TwinNode
from tuner.search_spaces.configuration import Settings
from tuner.workload.node.clocks.governor import NvmlGovernor
from tuner.workload.node.clocks.zeusd import ZeusdNvml

pytestmark = pytest.mark.needs("cc")
Make = Callable[..., TwinNode]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.workload.node.clocks.guard.WAIT_S", 0.0)


def locks(fake: TwinNode) -> list[tuple[int, int] | None]:
    return [fake.locked_MHz(gpu) for gpu in range(2)]


class Daemon(BaseHTTPRequestHandler):
    """What zeusd does with a request, on a fake machine where it is root."""

    fake: TwinNode
    log: list[str]
    unsupported = 400, b"NVML error: the requested operation is not available on target device"

    FIELDS = {  # noqa: RUF012
        "set_power_limit": ("power_limit_mw",),
        "set_gpu_locked_clocks": ("min_clock_mhz", "max_clock_mhz"),
        "reset_gpu_locked_clocks": (),
        "set_mem_locked_clocks": ("min_clock_mhz", "max_clock_mhz"),
        "reset_mem_locked_clocks": (),
    }
    #: What /discover answers (zeusd/src/routes/server.rs, DiscoveryInfo); None: no such route.
    told: Any = None

    def do_GET(self) -> None:
        if self.path == "/discover" and self.told is not None:
            self.answer(200, json.dumps(self.told).encode())
        else:
            self.answer(404)

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        command = url.path.removeprefix("/gpu/")
        if command not in self.FIELDS:
            self.answer(404)
            return
        words = dict(parse_qsl(url.query, strict_parsing=True))
        if set(words) != {"gpu_ids", *self.FIELDS[command], "block"} or words["block"] != "true":
            self.answer(400)
            return
        fields = {name: int(words[name]) for name in self.FIELDS[command]}
        self.carry_out(int(words["gpu_ids"]), command, fields)

    def answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body:  # a client that has its status is gone already
            self.wfile.write(body)

    def carry_out(self, index: int, command: str, body: dict[str, int]) -> None:
        self.log.append(f"{index} {command}")
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        calls: dict[str, Callable[..., None]] = {
            "set_power_limit": pynvml.nvmlDeviceSetPowerManagementLimit,
            "set_gpu_locked_clocks": pynvml.nvmlDeviceSetGpuLockedClocks,
            "reset_gpu_locked_clocks": pynvml.nvmlDeviceResetGpuLockedClocks,
            "set_mem_locked_clocks": pynvml.nvmlDeviceSetMemoryLockedClocks,
            "reset_mem_locked_clocks": pynvml.nvmlDeviceResetMemoryLockedClocks,
        }
        self.fake.permit(True)
        try:
            calls[command](handle, *body.values())
            status, said = 200, b""
        except pynvml.NVMLError_NotSupported:
            status, said = self.unsupported
        except pynvml.NVMLError:
            status, said = 400, b"NVML error: a supplied argument was invalid"
        finally:
            self.fake.permit(False)
        self.answer(status, said)

    def log_message(self, *_: object) -> None:
        pass

    def address_string(self) -> str:
        return "unix"


GPUS = [{"id": n, "name": "A100", "pci_address": f"0000:0{n + 1}:00.0"} for n in range(2)]
TOLD = {
    "gpus": GPUS,
    "cpus": [{"id": 0, "dram_available": True}],
    "enabled_api_groups": ["gpu-control", "gpu-read", "cpu-read"],
    "auth_required": False,
}


@pytest.fixture
def daemon(
    twin_node: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TwinNode, str, list[str]]]:
    gpus = TwinGpu(limit_W=350.0, pci_bus=1), TwinGpu(limit_W=375.0, pci_bus=2)
    fake = twin_node(*gpus, root=False)
    pynvml.nvmlInit()
    log: list[str] = []
    monkeypatch.setattr(Daemon, "told", TOLD)
    handler = type("Handler", (Daemon,), {"fake": fake, "log": log})
    path = str(tmp_path / "zeusd.sock")
    server = socketserver.UnixStreamServer(path, handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield fake, path, log
    server.shutdown()
    thread.join()
    server.server_close()


class TestZeusd:
    def test_sets_and_restores_for_those_who_may_not(
        self, daemon: tuple[TwinNode, str, list[str]]
    ) -> None:
        fake, path, log = daemon
        governor = NvmlGovernor(environ={"ZEUSD_SOCK_PATH": path}, guarded=False)
        assert (governor.can_set, governor.means) == (True, "zeusd")
        assert governor.supported_clocks_MHz[-1] == 1410
        governor.apply(Settings(clock_MHz=(900, 1200), power_limit_W=250))
        assert locks(fake) == [(900, 900), (1200, 1200)]
        assert [fake.limit_W(0), fake.limit_W(1)] == [250.0, 250.0]
        governor.close()
        assert locks(fake) == [None, None]
        assert [fake.limit_W(0), fake.limit_W(1)] == [350.0, 375.0]
        assert "1 set_gpu_locked_clocks" in log

    def test_a_daemon_that_is_not_there_is_said(self, twin_node: Make, tmp_path: Path) -> None:
        path = str(tmp_path / "nobody.sock")
        twin_node(root=False)
        governor = NvmlGovernor(environ={"ZEUSD_SOCK_PATH": path}, guarded=False)
        assert not governor.can_set
        assert "needs root" in governor.why_not
        assert f"zeusd at {path} does not do it either" in governor.why_not
        governor.close()

    def test_what_the_daemon_refuses_is_an_nvml_error(
        self, daemon: tuple[TwinNode, str, list[str]]
    ) -> None:
        _, path, _ = daemon
        nvml = ZeusdNvml(pynvml, path)
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(pynvml.NVMLError):
            nvml.nvmlDeviceSetPowerManagementLimit(handle, 5_000_000)
        assert nvml.nvmlDeviceGetPowerManagementLimit(handle) == 350_000
        with pytest.raises(pynvml.NVMLError_NotSupported):
            nvml.nvmlDeviceSetPersistenceMode(handle, 1)

    @pytest.mark.parametrize(
        "unsupported",
        [
            (400, b"NVML error: the requested operation is not available on target device"),
            (400, b"Not Supported"),
            (500, b"NVML error: the requested operation is not available on target device"),
            (404, b""),
        ],
    )
    def test_a_card_without_limits_locks_clocks_through_the_daemon(
        self,
        daemon: tuple[TwinNode, str, list[str]],
        monkeypatch: pytest.MonkeyPatch,
        unsupported: tuple[int, bytes],
    ) -> None:
        fake, path, _ = daemon
        fake.fail("nvmlDeviceSetPowerManagementLimit", pynvml.NVML_ERROR_NOT_SUPPORTED)
        monkeypatch.setattr(Daemon, "unsupported", unsupported)
        governor = NvmlGovernor(environ={"ZEUSD_SOCK_PATH": path}, guarded=False)
        assert (governor.why_not, governor.means) == ("", "zeusd")
        governor.apply(Settings(clock_MHz=900))
        assert locks(fake) == [(900, 900), (900, 900)]
        governor.close()

    def test_in_a_container_its_gpus_are_found_by_their_pci_address(
        self, daemon: tuple[TwinNode, str, list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The host's four GPUs, of which numbers 2 and 1 are this container's 0 and 1."""
        _, path, _ = daemon
        addresses = ["0000:81:00.0", "0000:02:00.0", "0000:01:00.0", "0000:c1:00.0"]
        gpus = [{"id": n, "name": "A100", "pci_address": a} for n, a in enumerate(addresses)]
        monkeypatch.setattr(Daemon, "told", {**TOLD, "gpus": gpus})
        nvml = ZeusdNvml(pynvml, path)
        assert nvml.why_not() == ""
        asked: list[str] = []
        monkeypatch.setattr(
            Daemon, "carry_out", lambda self, index, *_: (asked.append(index), self.answer(200))
        )
        for index in range(2):
            nvml.nvmlDeviceSetGpuLockedClocks(pynvml.nvmlDeviceGetHandleByIndex(index), 900, 900)
        assert asked == [2, 1]

    @pytest.mark.parametrize(
        ("told", "says"),
        [
            ({**TOLD, "auth_required": True}, "set ZEUSD_TOKEN"),
            ({**TOLD, "enabled_api_groups": ["gpu-read"]}, "--enable gpu-control,gpu-read"),
            ({**TOLD, "gpus": [{"id": 0, "pci_address": "0000:81:00.0"}] * 2}, "none of the GPUs"),
            ({"gpu_ids": [0, 1], "cpu_ids": [0]}, "releases before 0.5"),
            (None, "releases before 0.5"),
        ],
    )
    def test_one_that_may_not_be_used_says_why_and_sets_nothing(
        self,
        daemon: tuple[TwinNode, str, list[str]],
        monkeypatch: pytest.MonkeyPatch,
        told: Any,
        says: str,
    ) -> None:
        _, path, log = daemon
        monkeypatch.setattr(Daemon, "told", told)
        governor = NvmlGovernor(environ={"ZEUSD_SOCK_PATH": path}, guarded=False)
        assert not governor.can_set
        assert says in governor.why_not
        governor.close()
        assert log == []


@pytest.mark.root
def test_the_socket_of_another_user_is_sent_nothing(tmp_path: Path) -> None:
    heard: list[bytes] = []
    path = str(tmp_path / "zeusd.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.seteuid(65534)
        try:
            listener.listen()  # the kernel notes who listens
        finally:
            os.seteuid(0)

        def receive_events() -> None:
            with listener.accept()[0] as connection:
                heard.append(connection.recv(4096))

        thread = threading.Thread(target=receive_events)
        thread.start()
        with pytest.raises(pynvml.NVMLError):
            ZeusdNvml(pynvml, path, token="SECRET-TOKEN")._request("GET", "/discover")
        thread.join()
    assert heard == [b""]

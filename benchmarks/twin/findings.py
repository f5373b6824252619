"""The twenty findings of an audit of the GPU path, a check for each on the twin node.

A check returns a sentence if the fault is there, and an empty string if it is mended. A finding
without a check, or with a part that has none, counts as open.
"""

from __future__ import annotations

import contextlib
import os
import socketserver
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from benchmarks.twin.clocks import delivered_clock_error
from benchmarks.twin.energy import window_error
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.testing.twin import TwinGpu, TwinNode
from tuner.workload.clocks.governor import NvmlGovernor
from tuner.workload.clocks.zeusd import SOCKET
from tuner.workload.hook.link import _lacks_memory
from tuner.workload.meters.gpus import cuda_numbering
from tuner.workload.node.machine import detect_cluster
from tuner.workload.node.preflight import busy_gpus
from tuner.workload.node.rank_launch import Place, ProbeNode, RankLaunch
from tuner.workload.node.rank_server import RankServer
from tuner.workload.node.torch_build import TorchBuild, why_torch_cannot_use_gpus
from tuner.workload.probe import ProbeRequest

__all__ = ["FINDINGS", "Finding", "preload_touches"]

NOT_CHECKED = "not checked here"


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        number: in the audit.
        title: the fault.
        check: returns what is wrong, or an empty string; None: there is no check.
        remains: parts that the check does not cover; empty if it covers all.
    """

    number: int
    title: str
    check: Callable[[], str] | None = None
    remains: str = ""

    def state(self) -> str:
        """Return "" if mended, else why it is open."""
        if self.check is None:
            return NOT_CHECKED
        return self.check() or (f"{NOT_CHECKED}: {self.remains}" if self.remains else "")


@contextlib.contextmanager
def _node(*gpus: TwinGpu, **options: int) -> Iterator[TwinNode]:
    with tempfile.TemporaryDirectory() as folder:
        node = TwinNode(Path(folder) / "node", gpus, **options)  # type: ignore[arg-type]
        with node.joined():
            try:
                yield node
            finally:
                node.close()


@contextlib.contextmanager
def _server(node: TwinNode, text: str) -> Iterator[RankServer]:
    """Start a fork server whose only import is a module with this text."""
    (node.path.parent / "framework.py").write_text(text)
    path = os.pathsep.join([str(node.path.parent), os.environ.get("PYTHONPATH", "")])
    server = RankServer(needs=("framework",), env=node.environment() | {"PYTHONPATH": path})
    server._optional = ()
    try:
        server.start()
        yield server
    finally:
        server.close()


def preload_touches() -> int:
    """Return the calls by which the real preload of torch and DeepSpeed starts the CUDA driver."""
    with _node(TwinGpu(), virtual_time=False) as node:
        server = RankServer(env=node.environment() | {"DS_ACCELERATOR": "cuda"})
        try:
            server.start()
        finally:
            server.close()
        return len(node.cuda_touches())


def _driver_started() -> str:
    touch = "import ctypes\nctypes.CDLL('libcuda.so.1').cuInit(0)\n"
    with _node(TwinGpu(), virtual_time=False) as node, _server(node, touch) as server:
        return "" if server.fork_unsafe else "a driver that an import has started is not noticed"


def _uuids() -> str:
    with _node(TwinGpu(uuid="GPU-a"), TwinGpu(uuid="GPU-b")):
        listed = cuda_numbering({"CUDA_VISIBLE_DEVICES": "GPU-b"}).get("CUDA_VISIBLE_DEVICES")
    return "" if listed == "1" else f"a rank gets CUDA_VISIBLE_DEVICES={listed}"


def _display() -> str:
    with _node(TwinGpu(memory_bytes=8 * 2**30)) as node:
        node.processes(0, graphics=[(900, 2**30)])
        return "; ".join(busy_gpus(environ={}))


def _idle_clocks() -> str:
    worst = max(abs(delivered_clock_error(seed)) for seed in range(10))
    return "" if worst < 0.02 else f"delivered clocks are off by {worst:.0%}"


def _zeusd() -> str:
    """Send a lock to a daemon with the routes of 0.3: the request must be one of them."""
    seen: list[str] = []

    class Daemon(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(b'{"gpu_ids": [0, 1]}' if self.path == "/discover" else b"")

        def do_POST(self) -> None:
            seen.append(self.path)
            self._answer(b"")

        def _answer(self, body: bytes) -> None:
            self.send_response(200 if body or self.command == "POST" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if body:  # a client that has its status is gone already
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with _node(TwinGpu(), TwinGpu(), root=False) as node:
        path = str(node.path.parent / "zeusd.sock")
        with socketserver.UnixStreamServer(path, Daemon) as daemon:
            thread = threading.Thread(target=daemon.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            try:
                governor = NvmlGovernor(environ={SOCKET: path}, guard_nvml="")
                governor.apply(Settings(clock_MHz=900))
                governor.close()
            except InputError as error:
                return str(error)
            finally:
                daemon.shutdown()
                thread.join()
    wanted = "/gpu/set_gpu_locked_clocks?gpu_ids=1&min_clock_mhz=900&max_clock_mhz=900&block=true"
    return "" if wanted in seen else f"requests were {seen}"


def _nvml_kept() -> str:
    opens = "import pynvml\npynvml.nvmlInit()\n"
    with _node(TwinGpu(), virtual_time=False) as node, _server(node, opens) as server:
        assert server._process is not None
        folder = Path(f"/proc/{server._process.pid}/fd")
        kept = str(node.path) in [os.readlink(entry) for entry in folder.iterdir()]
    return "the fork server hands its NVML down to ranks" if kept else ""


def _edges() -> str:
    windows = [window_error(seed) for seed in range(30)]
    worst = max(abs(window.error) for window in windows if window.plain is not None)
    return "" if worst < 0.01 else f"window energies are off by up to {worst:.1%}"


def _rank_env(interface: str) -> Mapping[str, str]:
    """Return the environment of the only rank on a node of an H100 cluster."""
    node = SimpleNamespace(
        server=SimpleNamespace(env={}), cluster=load_cluster("h100-32"), run_dir=Path("run")
    )
    request = ProbeRequest("p", Configuration.of(data_parallel=1).launch)
    launch = RankLaunch(cast(ProbeNode, node), request)
    return launch._rank_env(0, 1, Place(0, 1, ("127.0.0.1", 1), interface))


def _unusable_torch() -> str:
    """Ask with a driver for CUDA 12 and a build with CUDA 13, and with a build for CPUs."""
    builds = TorchBuild("2.13.0", "13.0", "sm_80"), TorchBuild("2.13.0+cpu", "")
    with _node(TwinGpu(), cuda_driver=12040):
        passed = [build for build in builds if not why_torch_cannot_use_gpus(build, environ={})]
    return f"{passed[0]} passes" if passed else ""


def _order_and_interface() -> str:
    env = _rank_env("ib0")
    found = env.get("CUDA_DEVICE_ORDER"), env.get("NCCL_SOCKET_IFNAME")
    return "" if found == ("PCI_BUS_ID", "ib0") else f"a rank gets {found}"


def _library_memory() -> str:
    error = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
    return "" if _lacks_memory(error) else "CUBLAS_STATUS_ALLOC_FAILED is read as a crash"


def _threads() -> str:
    granted = os.sched_getaffinity(0)
    if (os.cpu_count() or 1) < 2:
        return "one core: nothing to be granted less of"
    try:
        os.sched_setaffinity(0, {min(granted)})
        threads = _rank_env("lo")["OMP_NUM_THREADS"]
    finally:
        os.sched_setaffinity(0, granted)
    return "" if threads == "1" else f"{threads} OMP threads on one granted core"


def _detected(gpu: TwinGpu) -> Cluster:
    with _node(gpu):
        return detect_cluster(environ={})


def _superchip() -> str:
    link_Bps = _detected(TwinGpu(name="NVIDIA GH200 480GB", c2c=True)).host_link_Bps
    return "" if link_Bps > 400e9 else f"the link of a superchip is {link_Bps / 1e9:.0f} GB/s"


def _boost() -> str:
    clock_MHz = _detected(TwinGpu(default_application_MHz=1155)).device.default_clock_MHz
    return "" if clock_MHz == 1410 else f"a device left alone is expected at {clock_MHz} MHz"


FINDINGS = (
    Finding(1, "DeepSpeed before 0.19.4 starts CUDA in the fork server", _driver_started),
    Finding(2, "weights are drawn on one CPU core a rank"),
    Finding(3, "a first step has the limit of a step"),
    Finding(4, "UUIDs in CUDA_VISIBLE_DEVICES end ZeRO 1 and 2", _uuids),
    Finding(5, "AsyncIOBuilder starts CUDA in the fork server, or needs nvcc"),
    Finding(6, "a card with a display is refused", _display),
    Finding(7, "delivered clocks include idle GPUs", _idle_clocks),
    Finding(8, "zeusd 0.3 and later answer 404", _zeusd),
    Finding(9, "ranks inherit an NVML that is not initialised", _nvml_kept),
    Finding(10, "probes cost global batches"),
    Finding(11, "step ends between boundaries are host times"),
    Finding(12, "a closing boundary subtracts its wait at a stale power", _edges),
    Finding(
        13,
        "nothing asks if torch can use the GPU",
        _unusable_torch,
        "a /dev/shm that is too small for NCCL",
    ),
    Finding(
        14,
        "OMP threads count cores that were not granted",
        _threads,
        "launch files count by nproc, which knows the affinity but no control group",
    ),
    Finding(
        15,
        "GH200: module counters, memory of HBM nodes, C2C links",
        _superchip,
        "a superchip whose scope GPU is the module's power is labelled as a GPU",
    ),
    Finding(
        16,
        "assumed peaks and the clock of a device left alone",
        _boost,
        "assumed peaks of GeForce and Blackwell, listed clocks that are never reached",
    ),
    Finding(
        17,
        "out-of-memory errors of CUDA libraries are read as crashes",
        _library_memory,
        "memory outside torch's allocator, and ranks that take long to release it",
    ),
    Finding(
        18,
        "device order, boundaries of other devices, NCCL's interface, folders of ops",
        _order_and_interface,
        "nodes of a shared home build ops in one folder",
    ),
    Finding(19, "the built-in program is plain transformers and DeepSpeed"),
    Finding(20, "idle power, idle locks, lost locks and other smaller ones"),
)

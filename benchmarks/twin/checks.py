"""Checks of the findings on the twin node.

Each returns a sentence if the fault is there, and an empty string if it is mended.
"""

from __future__ import annotations

import contextlib
import json
import os
import socketserver
import tempfile
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pynvml

from benchmarks.twin.clocks import delivered_clock_error, windows_without_a_clock
from benchmarks.twin.energy import window_error
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.testing.twin import TwinGpu, TwinNode
from tuner.workload.built_in_job import training_program
from tuner.workload.clocks.governor import NvmlGovernor
from tuner.workload.clocks.ways import ZEUSD_SOCKET
from tuner.workload.hook.link import _lacks_memory
from tuner.workload.meters.gpus import cuda_numbering
from tuner.workload.meters.nvml import NvmlMeter
from tuner.workload.node.device_watch import DeviceWatch
from tuner.workload.node.machine import detect_cluster
from tuner.workload.node.ops import TorchBuild
from tuner.workload.node.rank_launch import Place, ProbeNode, RankLaunch
from tuner.workload.node.rank_server import RankServer
from tuner.workload.platforms.nvidia import Nvidia
from tuner.workload.probe import Failure, ProbeRequest


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
    env = node.environment() | {"PYTHONPATH": path}
    server = RankServer(needs=("framework",), env=env, platform=Nvidia(env))
    server._optional = ()
    try:
        server.start()
        yield server
    finally:
        server.close()


def preload_touches(packages: Path | None = None) -> int | None:
    """Return the calls by which the preload of torch and DeepSpeed starts the CUDA driver.

    Args:
        packages: folder of a CUDA build of torch, in front of this environment's packages.

    Returns:
        Their number; None with a torch that has no CUDA, which could not start it.
    """
    with _node(TwinGpu(), virtual_time=False) as node:
        env = node.environment() | {"DS_ACCELERATOR": "cuda"}
        if packages is not None:
            paths = [str(packages), os.environ.get("PYTHONPATH", "")]
            env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        server = RankServer(env=env)
        try:
            server.start()
            cuda = server.torch is not None and server.torch.cuda
        finally:
            server.close()
        return len(node.cuda_touches()) if cuda else None


def driver_started() -> str:
    touch = "import ctypes\nctypes.CDLL('libcuda.so.1').cuInit(0)\n"
    with _node(TwinGpu(), virtual_time=False) as node, _server(node, touch) as server:
        return "" if server.fork_unsafe else "a driver that an import has started is not noticed"


def uuids() -> str:
    with _node(TwinGpu(uuid="GPU-a"), TwinGpu(uuid="GPU-b")):
        listed = cuda_numbering({"CUDA_VISIBLE_DEVICES": "GPU-b"}).get("CUDA_VISIBLE_DEVICES")
    return "" if listed == "1" else f"a rank gets CUDA_VISIBLE_DEVICES={listed}"


def display() -> str:
    with _node(TwinGpu(memory_bytes=8 * 2**30)) as node:
        node.processes(0, graphics=[(900, 2**30)])
        return "; ".join(Nvidia({}).busy())


def idle_clocks() -> str:
    worst = max(abs(delivered_clock_error(seed)) for seed in range(10))
    return "" if worst < 0.02 else f"delivered clocks are off by {worst:.0%}"


def zeusd() -> str:
    """Send a lock to a daemon with the routes of 0.5: the request must be one of them."""
    seen: list[str] = []
    gpus = [{"id": n, "pci_address": f"0000:0{n + 1}:00.0"} for n in range(2)]
    told = json.dumps({"gpus": gpus, "enabled_api_groups": ["gpu-control"]}).encode()

    class Daemon(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(told)

        def do_POST(self) -> None:
            seen.append(self.path)
            self._answer(b"")

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with _node(TwinGpu(pci_bus=1), TwinGpu(pci_bus=2), root=False) as node:
        path = str(node.path.parent / "zeusd.sock")
        with socketserver.UnixStreamServer(path, Daemon) as daemon:
            thread = threading.Thread(target=daemon.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            try:
                governor = NvmlGovernor(environ={ZEUSD_SOCKET: path}, guarded=False)
                governor.apply(Settings(clock_MHz=900))
                governor.close()
            except InputError as error:
                return str(error)
            finally:
                daemon.shutdown()
                thread.join()
    wanted = "/gpu/set_gpu_locked_clocks?gpu_ids=1&min_clock_mhz=900&max_clock_mhz=900&block=true"
    return "" if wanted in seen else f"requests were {seen}"


def nvml_kept() -> str:
    opens = "import pynvml\npynvml.nvmlInit()\n"
    with _node(TwinGpu(), virtual_time=False) as node, _server(node, opens) as server:
        assert server._process is not None
        folder = Path(f"/proc/{server._process.pid}/fd")
        kept = str(node.path) in [os.readlink(entry) for entry in folder.iterdir()]
    return "the fork server hands its NVML down to ranks" if kept else ""


def edges() -> str:
    windows = [window_error(seed) for seed in range(30)]
    worst = max(abs(window.error) for window in windows if window.plain is not None)
    return "" if worst < 0.01 else f"window energies are off by up to {worst:.1%}"


def _rank_env(interface: str) -> Mapping[str, str]:
    """Return the environment of the only rank on a node of an H100 cluster."""
    node = SimpleNamespace(
        server=SimpleNamespace(env={}),
        cluster=load_cluster("h100-32"),
        run_dir=Path("run"),
        job=load_job(),
        program=training_program(),
    )
    request = ProbeRequest("p", Configuration.of(data_parallel=1).launch)
    launch = RankLaunch(cast(ProbeNode, node), request)
    return launch._rank_env(0, 1, Place(0, 1, ("127.0.0.1", 1), interface))


def unusable_torch() -> str:
    """Ask with a driver for CUDA 12 and a build with CUDA 13, and with a build for CPUs."""
    builds = TorchBuild("2.13.0", "13.0", "sm_80"), TorchBuild("2.13.0+cpu", "")
    with _node(TwinGpu(), cuda_driver=12040):
        passed = [build for build in builds if not Nvidia({}).why_not_torch(build)]
    return f"{passed[0]} passes" if passed else ""


def order_and_interface() -> str:
    env = _rank_env("ib0")
    found = env.get("CUDA_DEVICE_ORDER"), env.get("NCCL_SOCKET_IFNAME")
    return "" if found == ("PCI_BUS_ID", "ib0") else f"a rank gets {found}"


def library_memory() -> str:
    error = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
    return "" if _lacks_memory(error) else "CUBLAS_STATUS_ALLOC_FAILED is read as a crash"


def threads() -> str:
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


def superchip() -> str:
    """Ask for the link, and for the scope of a GPU that tells its module's energy alone."""
    link_Bps = _detected(TwinGpu(name="NVIDIA GH200 480GB", c2c=True)).host_link_Bps
    if link_Bps < 400e9:
        return f"the link of a superchip is {link_Bps / 1e9:.0f} GB/s"
    gpu = TwinGpu(
        name="NVIDIA GH200 480GB",
        c2c=True,
        module_W=120.0,
        gpu_scope=0,
        counter_is_module=True,
        usage_is_module=True,
    )
    with _node(gpu) as node:
        meter = NvmlMeter(environ={}, clock=node.clock, sleep=node.sleep)
        scope = meter.info.scope
        meter.close()
    return "" if scope == "module" else f"a module's energy is labelled with the scope {scope!r}"


#: GPUs that no device file describes: cores, highest listed clock (MHz) and compute capability, and
#: the dense 16-bit peak with sums in fp32 of NVIDIA's data sheets, FLOP/s.
UNKNOWN_GPUS = {
    "NVIDIA GeForce RTX 3090": (10496, 2100, (8, 6), 71e12),
    "NVIDIA GeForce RTX 4090": (16384, 3105, (8, 9), 165e12),
    "NVIDIA GeForce RTX 5090": (21760, 3090, (12, 0), 210e12),
    "NVIDIA B300": (18944, 2032, (10, 3), 2250e12),
}


def peaks() -> str:
    """Compare the assumed peaks of unknown GPUs with their data sheets, to a third."""
    wrong = []
    for name, (cores, top_MHz, compute, peak) in UNKNOWN_GPUS.items():
        clocks = tuple(range(top_MHz % 15 + 300, top_MHz + 1, 15))
        gpu = TwinGpu(name=name, cores=cores, clock_MHz=clocks, compute=compute)
        assumed = _detected(gpu).device.peak_flops
        if abs(assumed / peak - 1) > 1 / 3:
            wrong.append(f"{name}: {assumed / 1e12:.0f} for {peak / 1e12:.0f} TFLOP/s")
    return "; ".join(wrong)


def built_op() -> str:
    """Let the fork server load an op whose builder asks CUDA which GPU to build for."""
    builder = (
        "import ctypes, os\n"
        "class AsyncIOBuilder:\n"
        "    def load(self, verbose=False):\n"
        "        if not os.environ.get('TORCH_CUDA_ARCH_LIST'):\n"
        "            ctypes.CDLL('libcuda.so.1').cuInit(0)\n"
    )
    with _node(TwinGpu(), virtual_time=False) as node:
        folder = node.path.parent / "deepspeed" / "ops"
        folder.mkdir(parents=True)
        for package in (folder.parent, folder):
            (package / "__init__.py").write_text("")
        (folder / "op_builder.py").write_text(builder)
        with _server(node, "") as server:
            server.load_ops(["AsyncIOBuilder"])
            return server.fork_unsafe and f"after it is loaded: {server.fork_unsafe}"


def assumed_clocks() -> str:
    """Ask for the peaks of unknown GPUs, and what a device reaches, left alone and when set."""
    clock_MHz = _detected(TwinGpu(default_application_MHz=1155)).device.default_clock_MHz
    if clock_MHz != 1410:
        return f"a device left alone is expected at {clock_MHz} MHz"
    # The first window may be at the lower one of the two clocks, or at the higher.
    lost = windows_without_a_clock()
    return peaks() or (f"{lost} windows at clocks that are never reached" if lost > 2 else "")


# ---- the second audit


def hidden_gpu() -> str:
    """Hide one GPU by a control group and drop another from the bus; the rest must be used."""
    for broken in ({"open_error": pynvml.NVML_ERROR_NO_PERMISSION}, {"lost": 1}):
        with _node(TwinGpu(), TwinGpu(), TwinGpu()) as node:
            node.set(2, **broken)
            try:
                cluster = detect_cluster(environ={"CUDA_VISIBLE_DEVICES": "0,1"})
            except InputError as error:
                return str(error)
        if cluster.devices_per_node != 2:
            return f"{cluster.devices_per_node} GPUs are detected of 2"
    return ""


def mismatch() -> str:
    """Update the driver without loading it."""
    with _node(TwinGpu()) as node:
        node.fail("nvmlInit", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        try:
            found = detect_cluster(environ={}).device.type
        except InputError as error:
            return "" if "reload the driver" in str(error) else f"the error is: {error}"
    return f"the node is one of {found}"


def looking() -> str:
    """Look at a node as root, as detection and doctor do."""
    with _node(TwinGpu(), TwinGpu()) as node:
        detect_cluster(environ={})
        NvmlGovernor(environ={}, guarded=False).close()
        return f"set: {node.log}" if node.log else ""


def damage() -> str:
    """Let memory fail while a rank reports an error that programs cause, too."""
    with _node(TwinGpu()) as node:
        watch = DeviceWatch(Nvidia())
        node.ecc_error(uncorrected=1)
        kind = watch.cause(Failure("crash", "an illegal memory access was encountered")).kind
        return "" if kind == "node" else f"a memory error of the GPU is a {kind}"

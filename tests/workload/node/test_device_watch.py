"""A damaged GPU is the node's fault, and a GPU that others use is not measured."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pynvml
import pytest

from benchmarks.twin.front import small_job
from tests.support.fake_clock import FakeClock
from tests.twin import TwinGpu, TwinNode
from tuner.search_spaces.configuration import Settings
from tuner.workload.node.host import family
from tuner.workload.node.measure.window import DeviceWatch, ProbeFailed, new_faults
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.platforms.cores import Cores
from tuner.workload.node.platforms.nvidia import Nvidia
from tuner.workload.node.probe_run import peak_bytes
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import Failure, ProbeRequest

pytestmark = pytest.mark.needs("cc")
Make = Callable[..., TwinNode]
GIB = 2**30


class TestDamage:
    @pytest.mark.parametrize("kind", ["crash", "hang", "time_limit"])
    @pytest.mark.parametrize(
        ("compute", "says"), [((8, 0), "1 more remapped rows"), ((7, 0), "1 more retired pages")]
    )
    def test_a_failure_in_which_a_counter_moved_is_the_nodes(
        self, twin_node: Make, kind: str, compute: tuple[int, int], says: str
    ) -> None:
        """CUDA says "illegal memory access" for it, too."""
        node = twin_node(TwinGpu(), TwinGpu(compute=compute))
        watch = DeviceWatch(Nvidia())
        failure = Failure(kind, "an illegal memory access was encountered")
        assert watch.cause(failure) is failure
        node.ecc_error(1, corrected=5, uncorrected=0)  # which the GPU has repaired
        assert watch.cause(failure) is failure
        node.ecc_error(1, uncorrected=1)
        found = watch.cause(failure)
        assert found.kind == "node"
        assert not found.blames_configuration
        assert "1 more uncorrectable memory errors" in found.message
        assert says in found.message
        assert failure.message in found.message

    def test_a_lost_gpu_is_the_nodes(self, twin_node: Make) -> None:
        """Also where CUDA_VISIBLE_DEVICES names the others only by their absence."""
        node = twin_node(TwinGpu(), TwinGpu(uuid="GPU-b"))
        watch = DeviceWatch(Nvidia())
        node.set(1, lost=1)
        assert watch.cause(Failure("crash", "x")).message == "GPU-b cannot be used any more: x"

    @pytest.mark.parametrize("kind", ["out_of_memory", "refused", "cancelled"])
    def test_what_the_configuration_or_the_user_did_stays_so(
        self, twin_node: Make, kind: str
    ) -> None:
        node = twin_node()
        watch = DeviceWatch(Nvidia())
        node.ecc_error(uncorrected=1)
        assert watch.cause(Failure(kind, "x")).kind == kind

    def test_errors_from_before_the_probe_and_cards_without_counters_blame_nothing(
        self, twin_node: Make
    ) -> None:
        node = twin_node(TwinGpu(), TwinGpu(has_ecc=False))
        node.ecc_error(uncorrected=3)
        before = Nvidia().faults()
        assert [sum(counters.values()) > 0 for counters in before.values()] == [True, False]
        assert new_faults(before, Nvidia().faults()) == ""
        node.fail("nvmlInit", pynvml.NVML_ERROR_UNKNOWN)
        assert Nvidia().faults() == {}
        assert DeviceWatch(Nvidia()).cause(Failure("crash", "x")).kind == "crash"


class TestOthers:
    @pytest.fixture
    def worker(self) -> Iterator[tuple[int, int]]:
        """A process and one that it has started: SuperOffload's worker."""
        code = (
            "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); "
            "print(child.pid, flush=True); sys.stdin.read(); child.kill()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as parent:
            assert parent.stdin is not None
            assert parent.stdout is not None
            yield parent.pid, int(parent.stdout.readline())
            parent.stdin.close()

    @pytest.mark.extra("tuner.workload.program.built_in_job")
    def test_an_inline_probe_on_a_gpu_in_use_is_refused(
        self, twin_node: Make, tmp_path: Path
    ) -> None:
        node = twin_node(TwinGpu(), TwinGpu(), virtual_time=False)
        node.processes(1, compute=[(77, GIB)])
        began = datetime.now(UTC) - timedelta(milliseconds=1)
        request = ProbeRequest("p0000", Settings(data_parallel=1))
        with closing(LocalRunner(small_job(), detect_cluster(), run_dir=tmp_path)) as runner:
            record = runner.run(request)
            assert record.failure is not None
            assert record.failure.kind == "node"
            assert record.failure.message == "GPU 1 is used by process 77"
            assert not runner.node.server.alive
            node.processes(1)
            node.set(1, lost=1)
            for _ in range(2):
                record = runner.run(request)
                assert record.failure is not None
                assert record.failure.kind == "node"
                assert "GPU-00000001" in record.failure.message
                assert record.host == socket.gethostname()
                assert datetime.fromisoformat(record.started_at) >= began
            assert not runner.node.server.alive

    def test_a_process_that_comes_in_a_window_is_noted(self, twin_node: Make) -> None:
        node = twin_node(TwinGpu(), TwinGpu())
        watch = DeviceWatch(Nvidia())
        watch.require_free()
        node.processes(0, compute=[(41, 30 * GIB), (42, GIB)])
        assert watch.others({41, 42}) == ""
        node.processes(1, compute=[(77, GIB)])
        assert watch.others({41, 42}) == "at the end of the window, GPU 1 is used by process 77"
        with pytest.raises(ProbeFailed, match="GPU 0 is used by processes 41, 42; GPU 1 is used"):
            watch.require_free()
        # None of the ranks is listed: NVML numbers processes of another container's.
        assert watch.others({1041, 1042}) == ""
        node.fail("nvmlDeviceGetCount", pynvml.NVML_ERROR_UNKNOWN)
        assert watch.others({41}) == ""

    def test_what_ranks_have_started_is_their_own(
        self, twin_node: Make, worker: tuple[int, int]
    ) -> None:
        """SuperOffload's worker is a second CUDA process of each rank."""
        rank, helper = worker
        node = twin_node()
        node.processes(0, compute=[(rank, 30 * GIB), (helper, GIB)])
        own = {rank, *family(rank)}
        assert helper in own
        assert Nvidia({}).memory_held(own) == 31 * GIB
        assert DeviceWatch(Nvidia()).others(own) == ""
        assert DeviceWatch(Nvidia()).others({rank}) != ""

    def test_cores_have_no_gpus_to_watch(self, twin_node: Make) -> None:
        node = twin_node()
        node.processes(0, compute=[(77, GIB)])
        watch = DeviceWatch(Cores())
        watch.require_free()
        node.ecc_error(uncorrected=1)
        assert watch.others({1}) == ""
        assert watch.cause(Failure("crash", "x")).kind == "crash"


def test_a_process_that_is_gone_has_no_family() -> None:
    assert family(0) == set()


@pytest.mark.needs("cc")
class TestMemory:
    def test_what_ranks_hold_outside_torchs_allocator_counts(
        self, twin_node: Callable[..., TwinNode]
    ) -> None:
        """The CUDA context, NCCL's and cuBLAS's buffers are part of the peak."""
        node = twin_node(TwinGpu(), TwinGpu())
        node.processes(0, compute=[(41, 30 * GIB), (900, GIB)])
        node.processes(1, compute=[(42, 31 * GIB)])
        assert Nvidia({}).memory_held([41, 42]) == 31 * GIB
        assert Nvidia({}).memory_held([7]) is None
        assert peak_bytes([{"device_bytes": 28 * GIB}], 31 * GIB) == 31 * GIB
        assert peak_bytes([{"host_bytes": 28 * GIB}], 31 * GIB) == 28 * GIB
        assert peak_bytes([{"device_bytes": 32 * GIB}], 31 * GIB) == 32 * GIB

    @pytest.mark.parametrize("listed", [True, False])
    def test_the_next_launch_waits_for_the_memory_of_the_last(
        self, twin_node: Callable[..., TwinNode], listed: bool
    ) -> None:
        """Unpinning takes longer than the kill, and the next ranks would not fit.

        In a container, where no process is listed, they would be refused as on a GPU in use.
        """
        node = twin_node(TwinGpu())
        node.processes(0, compute=[(41, 30 * GIB)] if listed else [])
        node.set(used_bytes=30 * GIB)
        clock = FakeClock(0.0)

        def sleep(seconds: float) -> None:
            clock.now_s += seconds
            if clock.now_s > 7.0:
                node.processes(0)

        waited_s = Nvidia({}).wait_for_release(clock=clock, sleep=sleep)
        assert waited_s == pytest.approx(7.1, abs=0.2)
        assert Nvidia({}).busy() == ()
        assert Nvidia({}).wait_for_release(clock=clock, sleep=sleep) == 0.0
        clock.now_s = 0.0
        node.processes(0, compute=[(900, GIB)])
        waited_s = Nvidia({}).wait_for_release(limit_s=5.0, clock=clock, sleep=sleep)
        assert waited_s == pytest.approx(5.1, abs=0.2)

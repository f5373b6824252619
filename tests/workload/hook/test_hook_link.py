"""Errors and boundaries of a rank on a CUDA device, with a fake torch."""

from __future__ import annotations

import errno
import json
import os
import sys
from types import SimpleNamespace

import pytest

from tuner.workload.hook import link as hook_link
from tuner.workload.records.probe import shown_by


class Cuda:
    """Devices of one rank; the last one holds its tensors."""

    def __init__(self, reserved: tuple[int, ...], free: int = 10, total: int = 100) -> None:
        self.reserved, self.memory, self.synchronized = reserved, (free, total), list[int]()

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return len(self.reserved)

    def current_device(self) -> int:
        return 0

    def memory_reserved(self, index: int) -> int:
        return self.reserved[index]

    max_memory_reserved = memory_reserved

    def synchronize(self, index: int) -> None:
        self.synchronized.append(index)

    def mem_get_info(self) -> tuple[int, int]:
        return self.memory


def failure(error: Exception) -> dict[str, object]:
    link = object.__new__(hook_link.Link)
    link.starting = False
    sent: list[str] = []
    link.send = sent.append  # type: ignore[method-assign]
    link.fail(error)
    told = json.loads(sent[0].removeprefix("fail "))
    return {**told, "kind": shown_by(told["evidence"])}


@pytest.mark.parametrize(
    ("message", "free", "kind"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", 50, True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", 50, True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling", 3, True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling", 60, False),
        ("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", 1, True),
        ("CUDA error: an illegal memory access was encountered", 1, False),
    ],
)
def test_libraries_that_find_no_memory_are_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, message: str, free: int, kind: bool
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Cuda((1,), free)))
    told = failure(RuntimeError(message))
    assert told["kind"] == ("out_of_memory" if kind else "crash")


def test_no_memory_inside_nccl_is_a_cause_and_no_effect() -> None:
    error = "NCCL error: unhandled cuda error ... Cuda failure 2 'out of memory'"
    assert failure(RuntimeError(error))["effect"] is False
    assert failure(RuntimeError(error))["kind"] == "out_of_memory"
    assert failure(RuntimeError("NCCL error: remote process exited"))["effect"] is True


def raised_while(earlier: Exception, later: Exception, *, hidden: bool = False) -> Exception:
    """The later error, as a handler of the earlier one raises it."""
    try:
        try:
            raise earlier
        except Exception:
            if hidden:
                raise later from None
            raise later  # noqa: B904
    except Exception as error:
        return error


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
QUOTA = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FULL, "disk_full"),
        (QUOTA, "disk_full"),
        (RuntimeError("Caught OSError in worker 0.\nOSError: [Errno 28] No space left"), "crash"),
        (RuntimeError(f"Caught OSError in DataLoader worker 0.\n{FULL}"), "disk_full"),
        (RuntimeError(f"NCCL error: cannot create /dev/shm/nccl-x: {FULL}"), "disk_full"),
        (raised_while(FULL, RuntimeError("unexpected pos 704 vs 598")), "disk_full"),
        (raised_while(FULL, KeyError("loss"), hidden=True), "crash"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), "crash"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "out_of_memory"),
        (ValueError("no space between the two words"), "crash"),
    ],
)
def test_a_full_file_system_is_named_whatever_library_wrote_to_it(
    error: Exception, kind: str
) -> None:
    told = failure(error)
    assert told["kind"] == kind
    assert told["effect"] is False or kind != "disk_full"


@pytest.mark.parametrize(("reserved", "waited"), [((0, 0, 7), [2]), ((5, 0), [0]), ((0, 0), [0])])
def test_a_boundary_waits_for_the_devices_that_hold_tensors(
    monkeypatch: pytest.MonkeyPatch, reserved: tuple[int, ...], waited: list[int]
) -> None:
    cuda = Cuda(reserved)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    hook_link.finish_device_work()
    assert cuda.synchronized == waited
    assert hook_link._peaks()["device_bytes"] == max(reserved)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("CUDA error: uncorrectable ECC error encountered", "node"),
        ("CUDA error: hardware stack error", "node"),
        ("CUDA error: an unknown hardware error occurred", "node"),
        (
            "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
            "node",
        ),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "node"),
        ("No CUDA GPUs are available", "node"),
        (
            "Error 802 from cudaGetDeviceCount(): system not yet initialized",
            "node",
        ),
        ("GPU is lost", "node"),
        ("NCCL error: unhandled cuda error ... uncorrectable ECC error encountered", "node"),
        ("the GPU has fallen off the bus", "node"),
        ("CUDA error: an illegal memory access was encountered", "crash"),
        ("CUDA error: unspecified launch failure", "crash"),
        ("the tokenizer is not yet initialized", "crash"),
        ("NCCL communicator of the data group is not yet initialized", "crash"),
        ("expert parallelism is faster over NVLink: give it 8 GPUs of one node", "crash"),
        ("the GPU throughput has fallen off by half, lower the micro-batch", "crash"),
        (
            "NCCL error: unhandled system error, ncclSystemError: System call (e.g. socket, "
            "malloc) or external library call failed or device error.",
            "crash",
        ),
        ("CUDA error: out of memory", "out_of_memory"),
    ],
)
def test_errors_of_the_hardware_are_the_nodes(message: str, kind: str) -> None:
    told = failure(RuntimeError(message))
    assert told["kind"] == kind
    if kind == "node":
        assert told["effect"] is False

"""Errors and boundaries of a rank on a CUDA device, with a fake torch."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.twin import TwinGpu, TwinNode
from tuner.workload.hook import batch_counts, engine, live, state, steps, watching
from tuner.workload.hook import link as hook_link
from tuner.workload.node.meters.gpus import cuda_numbering
from tuner.workload.records.probe import shown_by


class Cuda:
    """Devices of one rank, the last of which holds its tensors and runs behind its host.

    An event is reached when the device has come so far.
    """

    def __init__(self, reserved: tuple[int, ...] = (0, 1), free: int = 10) -> None:
        self.reserved, self.memory, self.synchronized = reserved, (free, 100), list[int]()
        self.device_s = 0.0  # the device's own clock, whose zero is nobody's
        self.queued_s = 0.0  # where the work that the host has queued will end
        outer = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: int) -> None:
                assert reserved[stream], "an event on a device that holds nothing of this rank"
                self.stream, self.at_s = stream, outer.queued_s

            def query(self) -> bool:
                return outer.device_s >= self.at_s

            def synchronize(self) -> None:
                outer.synchronized.append(self.stream)
                outer.device_s = max(outer.device_s, self.at_s)

            def elapsed_time(self, later: Any) -> float:
                assert later.query()
                return 1000 * (later.at_s - self.at_s)

        self.Event = Event

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return len(self.reserved)

    def current_device(self) -> int:
        return 0

    def current_stream(self, index: int) -> int:
        return index

    def memory_reserved(self, index: int) -> int:
        return self.reserved[index]

    max_memory_reserved = memory_reserved

    def synchronize(self, index: int) -> None:
        self.synchronized.append(index)
        self.device_s = self.queued_s

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


def raised(action: Callable[[], object]) -> Exception:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


class Odd:
    """An object of the program's own kind, which lacks what torch's has."""

    def __getattr__(self, name: str) -> None:
        raise AttributeError(name)

    def step(self, scale: float) -> float:
        return scale / 0


steps.count_engine(steps.StepCounter(lambda: None), Odd, "step", lambda engine: True)


@pytest.mark.parametrize(
    "action",
    [
        lambda: watching._settings_of(object()),  # no param_groups
        lambda: watching._settings_of(Odd()),  # told by a function of the object's
        lambda: watching._settings_of(SimpleNamespace(param_groups=[None])),
        lambda: batch_counts.StepCounts.attempt(object()),  # type: ignore[arg-type]
    ],
)
def test_an_error_of_the_hooks_own_code_is_not_the_programs(action: Callable[[], object]) -> None:
    told = failure(raised(action))
    assert (told["kind"], told["evidence"]) == ("hook", "hook")


@pytest.mark.parametrize(
    "action",
    [
        lambda: [][1],  # the program's own line
        lambda: Odd().step(1, 2),  # type: ignore[call-arg]  # its own function, below a patch
        lambda: Odd().step(1),  # which fails in itself
        lambda: state.configuration()["misspelt"],  # what the program asks for
        lambda: engine.parse_config("[1]"),  # what the hook says of the program's file
        lambda: engine.parse_config("{"),
    ],
)
def test_an_error_below_a_patch_or_of_what_the_program_gave_is_the_programs(
    action: Callable[[], object],
) -> None:
    assert failure(raised(action))["kind"] == "crash"


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
        ("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error", "node"),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "node"),
        ("No CUDA GPUs are available", "node"),
        ("Error 802 from cudaGetDeviceCount(): system not yet initialized", "node"),
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


# Phase marks: taken without waiting for the device.


def times(lines: str) -> list[tuple[str, float]]:
    return [(line.split()[1], float(line.split()[2])) for line in lines.splitlines()]


def test_on_cuda_a_mark_is_when_the_device_came_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    now_s = 500.0
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(hook_link.time, "monotonic", lambda: now_s)
    marks = hook_link.DeviceTimes()
    # The first boundary: the device is idle at 500 s, which is 0 s of its own.
    assert marks.all_lines() == ""
    # The host queues two phases of 2 s within no time, and the device has done 1 s of it.
    marks.add("phase forward")
    cuda.queued_s = 2.0
    marks.add("phase backward")
    cuda.queued_s = 4.0
    cuda.device_s = 1.0
    synchronized = [*cuda.synchronized]
    assert times(marks.lines()) == [("forward", 500.0)]
    assert cuda.synchronized == synchronized  # nothing waited for the device
    # The step's end is a boundary: the hook has waited, and the host's clock says 504.
    cuda.device_s, now_s = 4.0, 504.0
    assert times(marks.all_lines()) == [("backward", 502.0)]
    # Clocks drift apart; each boundary sets them anew.
    cuda.queued_s = cuda.device_s = 7.0
    now_s = 508.0
    marks.all_lines()
    marks.add("phase forward")
    cuda.queued_s = cuda.device_s = 9.0
    now_s = 510.0
    assert times(marks.all_lines()) == [("forward", 508.0)]


def test_on_cuda_a_step_ends_when_the_device_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 100 ms that the host launches in 10 ms each are steps of 100 ms."""
    cuda = Cuda()
    host_s = 500.0

    class Host:
        monotonic = staticmethod(lambda: host_s)

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(hook_link, "time", Host)
    rank = object.__new__(hook_link.Link)
    rank.steps, rank._until, rank._times = 0, 1, hook_link.DeviceTimes()
    rank._reports_phases = rank._phases = False
    sent: list[str] = []
    granted = iter(["run 21", "run 1000"])
    monkeypatch.setattr(rank, "send", lambda text: sent.extend(text.splitlines()))
    monkeypatch.setattr(rank, "_receive", lambda: next(granted))

    def synchronize(index: int) -> None:
        nonlocal host_s
        cuda.synchronized.append(index)
        cuda.device_s = cuda.queued_s
        host_s = max(host_s, 500.0 + cuda.device_s)

    cuda.synchronize = synchronize  # type: ignore[method-assign]
    syncs = 0
    for step in range(1, 22):
        host_s += 0.01
        cuda.queued_s = max(cuda.queued_s, host_s - 500.0) + 0.1
        cuda.device_s = max(cuda.device_s, host_s - 500.0)
        before = len(cuda.synchronized)
        rank.step_done()
        syncs += (len(cuda.synchronized) - before) * (1 < step < 21)
    ends = [float(line.split()[2]) for line in sent]
    assert [int(line.split()[1]) for line in sent] == list(range(1, 22))
    # The first of a block may hold the host's delay after the boundary.
    assert [b - a for a, b in pairwise(ends[1:])] == pytest.approx([0.1] * 19)
    assert syncs == 0, "the hook waited for the device within a block"


def test_on_a_cpu_a_mark_is_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(hook_link.time, "monotonic", lambda: 3.0)
    marks = hook_link.DeviceTimes()
    marks.add("phase forward.encoder")
    assert times(marks.lines()) == [("forward.encoder", 3.0)]
    assert marks.lines() == ""


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    kept = dict(state.options)
    yield
    state.forget_live()
    state.options.clear()
    state.options.update(kept)
    state.link = None


def test_values_are_set_and_read_back() -> None:
    state.link = SimpleNamespace(steps=0)
    seen: list[int] = []
    live("workers", seen.append, lambda: seen[-1] if seen else 2)
    live("silent", seen.append)
    assert state.present_values() == {"workers": 2, "silent": None}
    assert state.set_values({"workers": 4}) == {"read": {"workers": 4}}
    assert state.set_values({"silent": 1}) == {"read": {}}
    assert seen == [4, 1]


def test_a_refusal_and_an_unknown_knob_are_sentences() -> None:
    def refuse(value: int) -> None:
        raise ValueError("too many\nlines")

    live("workers", refuse)
    refused = state.set_values({"workers": 4})["refused"]
    assert refused == "the script's function for workers refused 4: ValueError: too many"
    assert "not registered a live knob 'other'" in state.set_values({"other": 1})["refused"]


def test_outside_a_probe_the_chosen_value_is_set_at_once() -> None:
    seen: list[int] = []
    live("workers", seen.append)
    state.options["live"] = {"workers": 8}
    live("workers", seen.append)
    assert seen == [8]
    state.link = SimpleNamespace(steps=0)
    live("workers", seen.append)
    assert seen == [8]


Make = Callable[..., TwinNode]


@pytest.mark.needs("cc")
@pytest.mark.real
@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({0: {"open_error": 4}, 1: {"open_error": 4}}, "0,1"),  # Slurm's job on the others
        ({1: {"lost": 1}}, "GPU-2,GPU-3"),
        ({}, "GPU-3,GPU-2"),
        ({0: {"lost": 1}}, None),
    ],
)
def test_deepspeed_asks_for_memory_whatever_numbers_the_gpus_have(
    twin_node: Make,
    monkeypatch: pytest.MonkeyPatch,
    broken: dict[int, dict[str, int]],
    named: str | None,
) -> None:
    """ZeRO 1 and 2 ask NVML at their start, by the number that CUDA has."""
    import torch
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    node = twin_node(*(TwinGpu(uuid=f"GPU-{index}") for index in range(4)))
    for index, change in broken.items():
        node.set(index, **change)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    for name, value in cuda_numbering(os.environ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 9))
    monkeypatch.setattr(CUDA_Accelerator, "available_memory", CUDA_Accelerator.available_memory)
    engine.allocate_cuda_memory(CUDA_Accelerator)
    assert CUDA_Accelerator().available_memory(0) == 7

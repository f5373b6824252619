"""`faults`: out of memory, a killed and a stopped rank, each followed by a clean probe."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pynvml

from benchmarks.gpu_hour.hour import Hour, described
from tuner.workload.node.rank_server import RankSpec


def faults(hour: Hour) -> None:
    pids = _watch_ranks(hour)

    def clean() -> str:
        name = f"clean{len(hour.lines)}"
        return f"{described(hour.probe(name, zero_stage=1))}; {left_over()}"

    for name, run in (
        ("out of memory (expected: out_of_memory)", lambda: out_of_memory(hour)),
        ("a rank is killed (expected: crash, signal 9)", lambda: hit(hour, pids, signal.SIGKILL)),
        (
            "a rank is stopped (expected: hang or time_limit)",
            lambda: hit(hour, pids, signal.SIGSTOP),
        ),
    ):
        hour.check(f"before {name.partition(' (')[0]}", clean)
        hour.check(name, run)
    hour.check("after a rank is stopped", clean)


def _watch_ranks(hour: Hour) -> list[int]:
    """Return a list that holds the process ids of the latest ranks."""
    server = hour.runner().node.server
    spawn, pids = server.spawn, list[int]()

    def noted(specs: Sequence[RankSpec], listener: object) -> object:
        group = spawn(specs, listener)  # type: ignore[arg-type]
        pids[:] = group.pids
        return group

    server.spawn = noted  # type: ignore[method-assign,assignment]
    return pids


def left_over() -> str:
    """Return the memory in use and the processes on the first GPU."""
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        used_GiB = pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30
        pids = [one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    finally:
        pynvml.nvmlShutdown()
    return f"afterwards {used_GiB:.1f} GiB in use, processes {pids}"


def out_of_memory(hour: Hour) -> str:
    """Train in micro-batches that no GPU holds; a rehearsal's job fits all the same."""
    job = hour.job(global_batch=4096, sequence_length=2048)
    micro_batch = 32 if hour.rehearse else 1024
    record = hour.probe("out-of-memory", job, micro_batch=micro_batch, zero_stage=0)
    return f"{described(record)}; {left_over()}"


def hit(hour: Hour, pids: Sequence[int], number: signal.Signals) -> str:
    """Send a rank a signal in the middle of a window."""
    name = number.name.lower()
    log = hour.work / "run" / "probes" / name / "rank0.log"

    def send() -> None:
        until_s = time.monotonic() + 90
        while time.monotonic() < until_s:
            time.sleep(0.5)
            if log.exists() and "step 4" in log.read_text(errors="replace"):
                time.sleep(1 if hour.rehearse else 4)
                os.kill(pids[0], number)
                return

    thread = threading.Thread(target=send)
    thread.start()
    record = hour.probe(name, window=replace(hour.window, min_s=25, max_s=30), zero_stage=1)
    thread.join()
    return f"{described(record)}; {left_over()}"

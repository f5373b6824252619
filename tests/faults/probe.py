"""Faults of the ranks, the agent and the training script, with real processes.

The study is `tuner.optimize` over the real runner: fork server, ranks, windows, records. The script
is a few lines that sleep and count steps, so that a probe takes a second; in the study's second
probe it does what the fault says. Afterwards no process that came from it may live, the other
probes must have measured, and the record must say what happened.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.driver import mended
from tests.faults.harness import (
    MARK,
    QUICK,
    Fault,
    LedgerRunner,
    Outcome,
    fork,
    joined,
    marked,
    outcome_of,
    run_of,
    sentence,
    wait_gone,
)
from tuner.executors.local import InlineExecutor
from tuner.workload.node.rank_server import RankServer
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import ProbeRecord, ProbeRequest, WindowPolicy

PROBES = 3
#: `BODY` runs in the study's second probe, after some steps; `START` in the same one, before any.
PROGRAM = """
import os, signal, subprocess, sys, time
import joulefront_hook as hook
here, rank = os.path.basename(os.getcwd()), int(os.environ["RANK"])
def note(what):
    with open(os.path.join(os.getcwd(), "..", "..", "noted"), "a") as file:
        file.write(f"{what} {here} {time.monotonic()}\\n")
note("start")
struck = here == "p0001"
if struck:
    pass
START
for step in range(10**9):
    time.sleep(0.02)
    if struck and step == 3:
        pass
BODY
    hook.step()
"""
SPACE = """what = "of the fault tests"
[knobs]
data_parallel = [1, 2]
micro_batch = [1, 2, 4]
"""


@functools.cache
def without_deepspeed() -> str:
    """Make a folder for PYTHONPATH that hides DeepSpeed: torch alone starts faster."""
    folder = Path(tempfile.mkdtemp(prefix="joulefront-fault-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "deepspeed.py").write_text('raise ModuleNotFoundError("hidden by the faults")\n')
    return str(folder)


def _torch_alone(server: RankServer) -> None:
    """Let a fork server import torch, and nothing that takes longer."""
    server._needs, server._optional = ("torch",), ()
    server.env["PYTHONPATH"] = without_deepspeed()


@functools.cache
def _server() -> tuple[RankServer, str]:
    """One fork server for all faults of this process, and its mark."""
    mark = f"probe-faults-{os.getpid()}"
    server = RankServer(env={MARK: mark})
    _torch_alone(server)
    atexit.register(server.close)
    return server, mark


def server_mark() -> tuple[str, int | None]:
    """Return the mark of what the shared fork server starts, and its own pid, which may stay."""
    server, mark = _server()
    return mark, server._process.pid if server._process is not None else None


def _program(folder: Path, body: str, start: str) -> Path:
    path = folder / "program.py"
    text = PROGRAM.replace("START", textwrap.indent(textwrap.dedent(start), " " * 4))
    path.write_text(text.replace("BODY", textwrap.indent(textwrap.dedent(body), " " * 8)))
    return path


def real_runner(
    folder: Path, body: str = "", *, start: str = "", shared: bool = True, **options: Any
) -> LocalRunner:
    """Return the real runner over the faults' own program.

    Args:
        folder: the fault's.
        body, start: what the second probe's ranks do, as Python.
        shared: use the fork server of this process; else one of its own, of the same kind.
        options: of `LocalRunner`.
    """
    from tests.support.studies import LONG_JOB
    from tuner.workload.node.platforms import detect_cluster

    options = {"step_limit_s": 4.0, "cluster": detect_cluster(), **options}
    runner = LocalRunner(
        LONG_JOB,
        options.pop("cluster"),
        run_dir=folder / "runs" / "study",
        program=_program(folder, body, start),
        **options,
    )
    if shared:
        runner.node = replace(runner.node, server=_server()[0])
    else:
        _torch_alone(runner.node.server)
    return runner


def study(
    folder: Path,
    runner: LocalRunner,
    *,
    probes: int = PROBES,
    space: str = SPACE,
    window: WindowPolicy = QUICK,
    before: Callable[[ProbeRequest], None] = lambda request: None,
) -> list[str]:
    """Run a study over that runner and return its notes; call `before` with each request."""
    import tuner
    from tests.support.studies import LONG_JOB

    notes: list[str] = []
    file = folder / "space.toml"
    file.write_text(space)
    tuner.optimize(
        LONG_JOB,
        cluster=runner.node.cluster,
        space=str(file),
        executor=InlineExecutor(
            LedgerRunner(runner, folder / "ledger", before), keep_in=folder / "runs" / "study"
        ),
        runs_dir=folder / "runs",
        name="study",
        search=tuner.SearchSettings(max_probes=probes, window=window),
        report=False,
        on_progress=lambda event: notes.append(event.message) if event.message else None,
    )
    return notes


def recorded(folder: Path) -> dict[str, ProbeRecord]:
    """Return the records of a fault's study by probe."""
    from tuner.workload.records.trace import read_trace

    records = read_trace(run_of(folder).trace).records
    return {record.request.probe_id: record for record in records}


def _recovery_s(folder: Path) -> float | None:
    """From the rank's death to the start of the next probe's first rank."""
    noted = folder / "runs/study/noted"
    lines = [line.split() for line in noted.read_text().splitlines()] if noted.exists() else []
    died = [float(at) for what, _, at in lines if what == "died"]
    later = [float(at) for what, probe, at in lines if what == "start" and probe == "p0002"]
    return min(later) - min(died) if died and later else None


def _judge(folder: Path, kind: str | None, word: str) -> Outcome:
    """Judge what a study of three probes left, the second of which was struck."""
    records = recorded(folder)
    struck = records["p0001"]
    failure = struck.failure
    said = failure.message if failure else str(dict(struck.environment).get("rank0.log", ""))
    return outcome_of(
        folder,
        ((failure.kind if failure else None) == kind, f"it is a {failure}"),
        (word in said, f"it said {said!r}"),
        (len(records) == PROBES, f"{len(records)} probes were made"),
        (all(r.ok for n, r in records.items() if n != "p0001"), "other probes failed"),
        said=said or "nothing: the probe was measured",
        processes_left=wait_gone(*server_mark()),
        recovery_s=_recovery_s(folder),
    )


def _struck(kind: str | None, word: str, body: str, folder: Path, *, start: str = "") -> Outcome:
    runner = real_runner(folder, body, start=start)
    with keep_server():
        study(folder, runner)
    return _judge(folder, kind, word)


@contextlib.contextmanager
def keep_server() -> Any:
    """Keep the shared fork server when the runner closes."""
    server = _server()[0]
    close = server.close
    server.close = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        server.close = close  # type: ignore[method-assign]


def _prints_gigabytes(folder: Path) -> Outcome:
    # 128 MiB in each of 16 steps: the next step comes before the limit of a hang.
    body = """
    if struck and step < 16:
        for _ in range(128):
            sys.stdout.write("x" * (1 << 20))
        print("the last line", flush=True)
    """
    body = textwrap.dedent(body)
    outcome = _struck(None, "MiB were printed", body, folder)
    logs = sum(path.stat().st_size for path in folder.glob("runs/study/probes/p0001/rank*.log"))
    from tuner.workload.node.rank_launch import LOG_LIMIT_BYTES

    # Twice: what is printed between two looks comes on top.
    if logs > 4 * LOG_LIMIT_BYTES:
        return Outcome(wrong=(f"the logs hold {logs >> 20} MiB",))
    return outcome


def _agent_ends(folder: Path, number: signal.Signals) -> Outcome:
    """Driver and agent are one process here; they end while ranks run, and are asked again."""

    def session(body: str) -> int:
        from tuner.cli import optimize as command
        from tuner.cli.main import main

        def optimize(args: object) -> int:
            print(*study(folder, real_runner(folder, body, shared=False)), sep="\n")
            return 0

        command._optimize = optimize
        return main(["optimize"])

    out = folder / "first.out"
    # The rank names itself before it waits, so that it is known to be there.
    body = "open('../../waiting', 'w').close(); time.sleep(1.5)"
    with marked() as mark:
        pid = fork(partial(session, body), out)
        until = time.monotonic() + 60
        while not (folder / "runs/study/waiting").exists() and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(pid, number)
        child = joined(pid, out)
        left = wait_gone(mark)
        again = folder / "second.out"
        resumed = joined(fork(partial(session, ""), again), again)
        left += wait_gone(mark)
    expected = 130 if number == signal.SIGINT else -number
    return outcome_of(
        folder,
        (child.code == expected, f"it ended with {child.code}: {child.said[-300:]}"),
        (resumed.code == 0, f"not resumed: {resumed.code} {resumed.said[-300:]}"),
        ("Traceback" not in child.said + resumed.said, "a traceback was shown"),
        said=sentence(child.said) or mended(resumed),
        processes_left=left,
    )


_STRAYS = """
if rank == 0:
    for _ in range(2):  # one in a session of its own, one whose parent is gone, too
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    subprocess.run(
        [sys.executable, "-c",
         "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"])
    raise RuntimeError("left its children behind")
"""
_SCRIBBLES = """
hook.state.link._socket.sendall(b"fail nonsense\\nstep x y\\nat\\n\\xff\\xfe\\x00\\npeak []\\n")
hook.state.link._socket.sendall(b"fail {}\\n")
open("record.json", "w").write("{}")
open("ds_config.json", "w").write("not JSON")
os.close(0)
"""
_STOPPED = """
if rank == 0:
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
"""
_HANGS_AT_EXIT = """
import atexit, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
atexit.register(time.sleep, 3600)
threading.Thread(target=time.sleep, args=(3600,)).start()
"""
_NO_NUMBERS = """
for line in (b"step 5 nan", b"step 6 inf", b"at 5 nan", b"step 7 -inf", b"phase forward nan",
             b'peak {"memory_bytes": NaN}', b'peak {"memory_bytes": [Infinity]}'):
    hook.state.link._socket.sendall(line + b"\\n")
"""
_MEMORY = """
import resource
if rank == 0:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
    hold = bytearray(1 << 34)
"""

#: (name, kind of the failure, words of its sentence, what the ranks do).
BODIES: tuple[tuple[str, str | None, str, str], ...] = (
    (
        "rank killed",
        "crash",
        "signal 9",
        "if rank == 0: note('died'); os.kill(os.getpid(), signal.SIGKILL)",
    ),
    (
        "rank dies of a segmentation fault",
        "crash",
        "signal 11",
        "if rank == 0: note('died'); os.kill(os.getpid(), signal.SIGSEGV)",
    ),
    (
        "rank raises",
        "crash",
        "lost column",
        "if rank == 0: note('died'); raise KeyError('lost column')",
    ),
    ("rank exits", "crash", "exit code 7", "if rank == 0: note('died'); os._exit(7)"),
    ("script ends too early", "ended", "ended by itself", "note('died'); sys.exit(0)"),
    ("rank hangs", "hang", "no optimizer step within 4 s", "if rank == 0: time.sleep(3600)"),
    (
        "rank hangs and ignores SIGTERM",
        "hang",
        "no optimizer step within 4 s",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)",
    ),
    (
        "out of memory on the device",
        "out_of_memory",
        "tried to allocate",
        "import torch\nif rank == 0: note('died'); raise torch.OutOfMemoryError("
        "'CUDA out of memory: tried to allocate 2 GiB')",
    ),
    ("out of memory on the host", "out_of_memory", "MemoryError", _MEMORY),
    ("script forks children that leave", "crash", "left its children behind", _STRAYS),
    ("script scribbles on the agent's line", None, "", _SCRIBBLES),
    ("script sends numbers that are none", None, "", _NO_NUMBERS),
    ("rank stopped and continued", None, "", _STOPPED),
    ("rank hangs at its exit", None, "", _HANGS_AT_EXIT),
    ("rank closes its output", None, "", "os.close(1); os.close(2)"),
    (
        "rank leaves a child and trains on",
        None,
        "",
        "subprocess.Popen(['sleep', '1000'], start_new_session=True)",
    ),
    (
        "fork server killed",
        "crash",
        "fork server ended",
        "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)",
    ),
)

FAULTS: tuple[Fault, ...] = (
    *(
        Fault(name, partial(_struck, kind, word, body), fast=False)
        for name, kind, word, body in BODIES
    ),
    Fault("script prints 2 GB a rank", _prints_gigabytes, fast=False),
    Fault(
        "driver and agent killed while ranks run",
        partial(_agent_ends, number=signal.SIGKILL),
        fast=False,
    ),
    Fault("Ctrl-C while ranks run", partial(_agent_ends, number=signal.SIGINT), fast=False),
)

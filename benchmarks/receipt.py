"""The receipt of `tuner run -- COMMAND`: its error, and what it costs the command.

(1) On a twin GPU node, random loads of two GPUs with imperfect sensors (as in `benchmarks.twin`)
are measured by the command, in real time, and the receipt's energy is compared with the exact one
of the same span.
(2) Two equal trainings on cores, one with the receipt and one without, run in turn for some tenths
of a second, while the other one is stopped, over rounds of new processes, for two processes of the
same program differ by some per cent.
(3) Commands run on cores that others use.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from scipy.stats import ttest_1samp

from benchmarks.figures import ROOT, Figure, arguments, publish
from benchmarks.twin.energy import random_gpu
from tests.twin import TwinNode
from tuner.receipt.measure import open_node_meter
from tuner.workload.node.meters.rapl import EstimatedMeter

#: Time of a random load, and between two looks at the exact energy, seconds.
PHASE_S, TRUTH_S = (0.05, 0.8), 0.002
#: A small training. It counts its steps in the file that it is given, after its process id.
TRAIN = """
import mmap, os, struct, sys, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(1024, 512))
loader = torch.utils.data.DataLoader(data, batch_size=16)
counts, steps = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 16), 0
while True:
    for (x,) in loader:
        (model(x) - x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        struct.pack_into("qq", counts, 0, os.getpid(), steps)
"""
#: Prints the seconds of the step of an optimizer that has nothing to change.
BARE = """
import time, torch
optimizer, times = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), []
for _ in range(20):
    began = time.perf_counter()
    for _ in range(500):
        optimizer.step()
    times.append((time.perf_counter() - began) / 500)
print(min(times))
"""
#: Works in the given number of processes, and prints its processor time and the time that it takes
#: alone.
BURN = """
import os, resource, sys, time
def burn():
    until_s = time.process_time() + 1.5
    while time.process_time() < until_s:
        sum(range(1000))
count = int(sys.argv[1])
for _ in range(count - 1):
    if not os.fork():
        burn()
        os._exit(0)
burn()
while count > 1:
    os.wait()
    count -= 1
own, theirs = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(own.ru_utime + own.ru_stime + theirs.ru_utime + theirs.ru_stime, own.ru_utime + own.ru_stime)
"""
#: Steps before the first comparison, and seconds for which a training runs before each.
WARM_STEPS, WARM_S = 100, 0.03


class Truth:
    """Exact energy of a twin node over time, from construction until `stop`."""

    def __init__(self, node: TwinNode) -> None:
        self._node, self._stopped = node, threading.Event()
        self._times: list[float] = []
        self._energies: list[float] = []
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stopped.wait(TRUTH_S):
            before_s = self._node.clock()
            energy_J = self._node.energy_J()
            self._times.append((before_s + self._node.clock()) / 2)
            self._energies.append(energy_J)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def energy_J(self, time_s: float) -> float:
        """Return the energy at a time, on the line between two looks."""
        last = min(bisect.bisect(self._times, time_s), len(self._times) - 1)
        t0, t1 = self._times[last - 1], self._times[last]
        e0, e1 = self._energies[last - 1], self._energies[last]
        return e0 + (e1 - e0) * (time_s - t0) / (t1 - t0) if t1 > t0 else e0


def receipt_error(seed: int, seconds: float) -> float:
    """Measure one command on a twin node with random loads; return its relative error."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        gpus = [random_gpu(draw, counted=True) for _ in range(2)]
        node = TwinNode(Path(folder) / "node", gpus, virtual_time=False, cores=8)
        truth, file = Truth(node), Path(folder) / "energy.json"
        try:
            words = [sys.executable, "-m", "tuner.cli", "run", "--out", str(file), "--"]
            ready, end = Path(folder) / "ready", Path(folder) / "end"
            line = f"touch {ready}; while [ ! -e {end} ]; do sleep 0.01; done"
            env = os.environ | node.environment() | {"PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(
                [*words, "sh", "-c", line], env=env, cwd=folder, stderr=subprocess.DEVNULL
            )
            while not ready.exists() and process.poll() is None:
                time.sleep(0.01)
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                for gpu in range(2):
                    node.set(gpu, load=draw.choice((0.0, draw.random(), 1.0)))
                time.sleep(draw.uniform(*PHASE_S))
            node.set(load=0.0)
            end.touch()
            process.wait(60)
            receipt = json.loads(file.read_text())
        finally:
            truth.stop()
            node.close()
    began_s = receipt["began_monotonic_s"]
    exact_J = truth.energy_J(began_s + receipt["time_s"]) - truth.energy_J(began_s)
    return float(receipt["energy_J"] / exact_J - 1)


def errors(runs: int, seconds: float) -> list[Figure]:
    every = [100 * abs(receipt_error(seed, seconds)) for seed in range(runs)]
    listed = ", ".join(f"{each:.4f}" for each in every)
    print(f"{runs} commands of {seconds:.0f} s on 2 twin GPUs, errors: {listed} %")
    return [
        Figure("receipt_error_median", statistics.median(every), "%"),
        Figure("receipt_error_worst", max(every), "%"),
    ]


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, that of threads which have ended included, seconds.

    The number of a process's clock is what clock_getcpuclockid(3) returns of it.
    """
    return time.clock_gettime((~pid << 3) | 2)


class Training:
    """A training that runs as long as it is let, with the receipt or without."""

    def __init__(self, folder: Path, *, measured: bool) -> None:
        self._counts = folder / f"counts-{measured}"
        self._counts.write_bytes(bytes(16))
        words = [sys.executable, "train.py", str(self._counts)]
        if measured:
            words = [*_tuner(folder), *words]
        self.process = subprocess.Popen(words, cwd=folder, env=_env(), stderr=subprocess.DEVNULL)
        while self._read()[1] < WARM_STEPS:
            time.sleep(0.05)
        self.pid = self._read()[0]
        os.kill(self.pid, signal.SIGSTOP)

    def _read(self) -> tuple[int, int]:
        pid, steps = struct.unpack("qq", self._counts.read_bytes())
        return pid, steps

    def step_s(self, seconds: float) -> float:
        """Let it run; return the processor time of a step."""
        os.kill(self.pid, signal.SIGCONT)
        time.sleep(WARM_S)
        began_s, began = cpu_s(self.pid), self._read()[1]
        time.sleep(seconds)
        while self._read()[1] == began:  # on a busy machine a step may take longer
            time.sleep(WARM_S)
        ended_s, ended = cpu_s(self.pid), self._read()[1]
        os.kill(self.pid, signal.SIGSTOP)
        return (ended_s - began_s) / (ended - began)

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait(30)


def _tuner(folder: Path) -> list[str]:
    return [sys.executable, "-m", "tuner.cli", "run", "--out", str(folder / "energy.json"), "--"]


def _env() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _round(folder: Path, pairs: int, seconds: float, order: random.Random) -> float:
    # Median log ratio of the steps of two new processes.
    trainings = {way: Training(folder, measured=way) for way in order.sample((True, False), 2)}
    logs = []
    try:
        for _ in range(pairs):
            found = {way: trainings[way].step_s(seconds) for way in order.sample((True, False), 2)}
            logs.append(math.log(found[True] / found[False]))
    finally:
        for training in trainings.values():
            training.close()
    return statistics.median(logs)


def overhead(rounds: int, pairs: int, seconds: float) -> list[Figure]:
    """Return what the receipt costs a training on cores."""
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        logs = [_round(folder, pairs, seconds, order) for _ in range(rounds)]
        bare_s = {
            way: min(_bare_step_s(folder, measured=way) for _ in range(3)) for way in (False, True)
        }
    listed = ", ".join(f"{100 * math.expm1(each):.2f}" for each in logs)
    print(f"{rounds} rounds of {pairs} pairs of {seconds:g} s: {listed} %")
    interval = ttest_1samp(logs, 0.0).confidence_interval(0.95)
    low, high = (100 * math.expm1(each) for each in interval)
    return [
        Figure("receipt_overhead", 100 * math.expm1(statistics.fmean(logs)), "%"),
        Figure("receipt_overhead_low", low, "%"),
        Figure("receipt_overhead_high", high, "%"),
        Figure("receipt_step_cost", 1e6 * (bare_s[True] - bare_s[False]), "us"),
    ]


def _bare_step_s(folder: Path, *, measured: bool) -> float:
    words = [*(_tuner(folder) if measured else []), sys.executable, "-c", BARE]
    done = subprocess.run(words, cwd=folder, env=_env(), capture_output=True, check=True)
    return float(done.stdout)


def shares(rounds: int) -> list[Figure]:
    """Return the error of the energy that is the command's own, where others work, too."""
    meter = open_node_meter()
    if not isinstance(meter, EstimatedMeter):
        print("the formula of this machine's meter is not known: no share_error")
        return []
    own, whole = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "burn.py").write_text(BURN)
        for number in range(rounds):
            processes, others = 1 + number % 2, 1 + number // 2 % 2
            loads = [
                subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)
            ]
            try:
                words = [*_tuner(folder), sys.executable, "burn.py", str(processes)]
                done = subprocess.run(
                    words, cwd=folder, env=_env(), capture_output=True, check=True, text=True
                )
            finally:
                for load in loads:
                    load.kill()
                    load.wait(30)
            used_s, alone_s = map(float, done.stdout.split())
            alone_J = meter.idle_W * alone_s + meter.busy_W * used_s
            receipt = json.loads((folder / "energy.json").read_text())
            own.append(receipt["own_energy_J"] / alone_J - 1)
            whole.append(receipt["energy_J"] / alone_J - 1)
            print(
                f"{processes} processes beside {others}: {alone_J:.1f} J alone, told "
                f"{receipt['own_energy_J']:.1f} J of {receipt['energy_J']:.1f} J"
            )
    return [
        Figure("share_error", 100 * statistics.median(map(abs, own)), "%"),
        Figure("share_error_worst", 100 * max(map(abs, own)), "%"),
        Figure("share_error_without", 100 * statistics.median(map(abs, whole)), "%"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "receipt")
    parser.add_argument("--runs", type=int, default=8, help="on the twin; 0 skips (default: 8)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each (default: 15)")
    parser.add_argument("--rounds", type=int, default=12, help="at least 2; 0 skips (default: 12)")
    parser.add_argument("--pairs", type=int, default=12, help="of each round (default: 12)")
    parser.add_argument(
        "--half", type=float, default=0.3, help="seconds of each half (default: 0.3)"
    )
    parser.add_argument("--shares", type=int, default=8, help="rounds; 0 skips (default: 8)")
    options = parser.parse_args(argv)
    figures = errors(options.runs, options.seconds) if options.runs else []
    if options.rounds:
        figures += overhead(options.rounds, options.pairs, options.half)
    if options.shares:
        figures += shares(options.shares)
    publish(figures, options.json)


if __name__ == "__main__":
    main()

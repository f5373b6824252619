"""The receipt of `tuner run -- COMMAND`: its error, and what it costs the command.

(1) On a twin GPU node, random loads of two GPUs with imperfect sensors (as in `benchmarks.twin`)
are measured by the command, in real time, and the receipt's energy is compared with the exact one
of the same span: `receipt_error_median`, `receipt_error_worst` (aim 0.1 %).
(2) A training on cores runs with the receipt and without, alternately. `receipt_overhead` compares
the processor time of its steps (aim 0.5 %), with a 95 % interval of the pairs, which neighbours on
the machine disturb less than `receipt_overhead_wall`, their elapsed time. `receipt_start` is the
time that the whole command takes longer, and `receipt_core_share` what tuner itself uses of a core
while the command runs.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import ttest_1samp

from benchmarks.figures import ROOT, Figure, arguments, publish
from benchmarks.twin.energy import random_gpu
from tuner.testing.twin import TwinNode

#: Time of a random load, and between two looks at the exact energy, seconds.
PHASE_S, TRUTH_S = (0.05, 0.8), 0.002
#: A training of small matrices; it prints the seconds of its steps after the first twenty: elapsed,
#: and of the processor.
TRAIN = """
import sys, time, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(4096, 256))
loader = torch.utils.data.DataLoader(data, batch_size=64)
steps, done = int(sys.argv[1]), 0
while done < steps + 20:
    for (x,) in loader:
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done == 20:
            began = time.perf_counter(), time.process_time()
        if done == steps + 20:
            break
print(time.perf_counter() - began[0], time.process_time() - began[1], time.process_time())
"""


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
        """End the looks."""
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
        gpus = [random_gpu(draw, counted=True, ideal=False) for _ in range(2)]
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
    """Return the error of the receipt on the twin node."""
    every = [100 * abs(receipt_error(seed, seconds)) for seed in range(runs)]
    listed = ", ".join(f"{each:.4f}" for each in every)
    print(f"{runs} commands of {seconds:.0f} s on 2 twin GPUs, errors: {listed} %")
    return [
        Figure("receipt_error_median", statistics.median(every), "%"),
        Figure("receipt_error_worst", max(every), "%"),
    ]


@dataclass(frozen=True)
class Run:
    """Seconds of one run: of its steps, elapsed and of the processor, of the whole command, and
    of the processor for everything but the training."""

    steps_s: float
    steps_cpu_s: float
    whole_s: float
    other_cpu_s: float


def _run(words: list[str], folder: Path, *, measured: bool) -> Run:
    if measured:
        out = ["--out", str(folder / "energy.json")]
        words = [sys.executable, "-m", "tuner.cli", "run", *out, "--", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(words, env=env, cwd=folder, capture_output=True, check=True)
    after, whole_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began_s
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    steps_s, steps_cpu_s, own_s = map(float, done.stdout.split() or (0.0, 0.0, 0.0))
    return Run(steps_s, steps_cpu_s, whole_s, used_s - own_s)


def overhead(pairs: int, steps: int) -> list[Figure]:
    """Return what the receipt costs a training on cores."""
    found: list[tuple[Run, Run]] = []
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        words = [sys.executable, "train.py", str(steps)]
        empty = min(_run(["true"], folder, measured=True).other_cpu_s for _ in range(5))
        _run([*words[:2], "50"], folder, measured=True)
        for _ in range(pairs):
            ways = order.sample((True, False), 2)
            runs = {measured: _run(words, folder, measured=measured) for measured in ways}
            found.append((runs[True], runs[False]))
    step_ms = 1000 * statistics.median(plain.steps_s for _, plain in found) / steps
    print(f"steps of {step_ms:.2f} ms; {pairs} pairs of {steps} steps")
    logs = [math.log(measured.steps_cpu_s / plain.steps_cpu_s) for measured, plain in found]
    walls = [math.log(measured.steps_s / plain.steps_s) for measured, plain in found]
    starts = [(a.whole_s - a.steps_s) - (b.whole_s - b.steps_s) for a, b in found]
    shares = [(measured.other_cpu_s - empty) / measured.whole_s for measured, _ in found]
    interval = ttest_1samp(logs, 0.0).confidence_interval(0.95)
    low, cost, high = (
        100 * math.expm1(each) for each in sorted((statistics.fmean(logs), *interval))
    )
    return [
        Figure("receipt_overhead", cost, "%"),
        Figure("receipt_overhead_low", low, "%"),
        Figure("receipt_overhead_high", high, "%"),
        Figure("receipt_overhead_wall", 100 * math.expm1(statistics.median(walls)), "%"),
        Figure("receipt_core_share", 100 * statistics.median(shares), "%"),
        Figure("receipt_start", statistics.median(starts), "s"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = arguments("the receipt of a measured command: its error and its cost")
    parser.add_argument("--runs", type=int, default=8, help="on the twin; 0 skips (default: 8)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each (default: 15)")
    parser.add_argument("--pairs", type=int, default=20, help="at least 2; 0 skips (default: 20)")
    parser.add_argument("--steps", type=int, default=3000, help="of each half (default: 3000)")
    options = parser.parse_args(argv)
    figures = errors(options.runs, options.seconds) if options.runs else []
    figures += overhead(options.pairs, options.steps) if options.pairs else []
    publish(figures, options.json)


if __name__ == "__main__":
    main()

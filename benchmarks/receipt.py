"""The receipt of `tuner run -- COMMAND`: its error, and what it costs the command.

(1) On a twin GPU node, random loads of two GPUs with imperfect sensors (as in `benchmarks.twin`)
are measured by the command, in real time, and the receipt's energy is compared with the exact one
of the same span: `receipt_error_median`, `receipt_error_worst` (aim 0.1 %).
(2) A training on cores runs with the receipt and without, alternately. `receipt_overhead` compares
the fastest twenty steps of all runs of each kind (aim 0.5 %), since neighbours on the machine slow
down others; the 95 % interval of the runs' pairs, `receipt_overhead_low` and `_high`, shows how
quiet it was. `receipt_step_cost` is the time that counting takes in a step that does nothing else,
`receipt_start` the time that the whole command takes longer, and `receipt_core_share` what tuner
itself uses of a core while the command runs.
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
#: A small training. It prints the seconds of a step in its fastest twenty, of all steps, and of the
#: processor; then those of the step of an optimizer without gradients.
TRAIN = """
import sys, time, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(4096, 512))
loader = torch.utils.data.DataLoader(data, batch_size=32)
ends, steps = [], int(sys.argv[1])
while len(ends) <= steps:
    for (x,) in loader:
        (model(x) - x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
fastest = min(b - a for a, b in zip(ends, ends[20:])) / 20
bare = []
for _ in range(20):
    began = time.perf_counter()
    for _ in range(500):
        optimizer.step()
    bare.append((time.perf_counter() - began) / 500)
print(fastest, ends[-1] - ends[0], time.process_time(), min(bare))
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
    """Seconds of one run: of a step in its fastest twenty, of all steps, of the whole command, of
    the processor for everything but the training, and of a step that does nothing."""

    step_s: float
    steps_s: float
    whole_s: float
    other_cpu_s: float
    bare_step_s: float


def _run(words: list[str], folder: Path, *, measured: bool) -> Run:
    if measured:
        out = ["--out", str(folder / "energy.json")]
        words = [sys.executable, "-m", "tuner.cli", "run", *out, "--", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(words, env=env, cwd=folder, capture_output=True, check=True)
    after, whole_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began_s
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    step_s, steps_s, own_s, bare_s = map(float, done.stdout.split() or [0.0] * 4)
    return Run(step_s, steps_s, whole_s, used_s - own_s, bare_s)


def overhead(pairs: int, steps: int) -> list[Figure]:
    """Return what the receipt costs a training on cores."""
    found: list[tuple[Run, Run]] = []
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        words = [sys.executable, "train.py", str(steps)]
        empty_s = min(_run(["true"], folder, measured=True).other_cpu_s for _ in range(5))
        _run([*words[:2], "50"], folder, measured=True)
        for _ in range(pairs):
            ways = order.sample((True, False), 2)
            runs = {measured: _run(words, folder, measured=measured) for measured in ways}
            found.append((runs[True], runs[False]))
    step_s = [min(each[way].step_s for each in found) for way in (0, 1)]
    print(f"steps of {1000 * step_s[1]:.2f} ms; {pairs} pairs of {steps} steps")
    logs = [math.log(measured.step_s / plain.step_s) for measured, plain in found]
    starts = [(a.whole_s - a.steps_s) - (b.whole_s - b.steps_s) for a, b in found]
    shares = [(a.other_cpu_s - b.other_cpu_s - empty_s) / a.whole_s for a, b in found]
    bare_s = [min(each[way].bare_step_s for each in found) for way in (0, 1)]
    interval = ttest_1samp(logs, 0.0).confidence_interval(0.95)
    low, high = (100 * math.expm1(each) for each in interval)
    return [
        Figure("receipt_overhead", 100 * (step_s[0] / step_s[1] - 1), "%"),
        Figure("receipt_overhead_low", low, "%"),
        Figure("receipt_overhead_high", high, "%"),
        Figure("receipt_step_cost", 1e6 * (bare_s[0] - bare_s[1]), "us"),
        Figure("receipt_core_share", 100 * statistics.median(shares), "%"),
        Figure("receipt_start", statistics.median(starts), "s"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = arguments("the receipt of a measured command: its error and its cost")
    parser.add_argument("--runs", type=int, default=8, help="on the twin; 0 skips (default: 8)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each (default: 15)")
    parser.add_argument("--pairs", type=int, default=20, help="at least 2; 0 skips (default: 20)")
    parser.add_argument("--steps", type=int, default=512, help="of each half (default: 512)")
    options = parser.parse_args(argv)
    figures = errors(options.runs, options.seconds) if options.runs else []
    figures += overhead(options.pairs, options.steps) if options.pairs else []
    publish(figures, options.json)


if __name__ == "__main__":
    main()

"""Agreement with Zeus: the energy of the same windows of the same GPUs.

Zeus (PyPI `zeus`) is the established tool for this measurement. It cannot share an environment with
Ray (its `amdsmi` breaks `import ray`), so it is installed in a temporary one, where both meters
read one fake NVML on one clock. A window's energy by the bare counter must agree to the millijoule;
the meter's own boundaries, which are finer than the counter's steps, are compared with the exact
truth of the fake.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import ROOT, Figure, arguments, publish
from tuner.testing.commands import finished

#: Runs inside the other environment: prints a JSON list of windows.
SCRIPT = """
import json, random, sys
import pynvml as real
from tuner.testing.fake_nvml import FakeClock, FakeGpu, FakeNVML
draw = random.Random(0)
clock = FakeClock()
gpus = [FakeGpu(load=((0.0, 0.4), (0.3, 1.0), (0.9, 0.0)), load_period_s=1.3),
        FakeGpu(load=((0.0, 0.7),), peak_W=310.0, counter_period_s=0.05)]
fake = FakeNVML(gpus, clock=clock)
fake.nvmlInit()
fake._nvmlGetFunctionPointer = None  # by this Zeus knows the official binding
sys.modules["pynvml"] = fake
import zeus
from zeus.monitor import ZeusMonitor
from tuner.workload.meters.nvml import NvmlMeter
peer = ZeusMonitor(gpu_indices=[0, 1], cpu_indices=[])
ours = NvmlMeter(nvml=fake, clock=clock, sleep=clock.advance, environ={})
rows = []
for number in range(int(sys.argv[1])):
    clock.advance(draw.uniform(0.1, 1.0))
    opened = ours.boundary(opens=True)
    start_s = clock.now_s
    bare = ours.read().energy_J
    peer.begin_window(f"w{number}", sync_execution=False)
    clock.advance(draw.uniform(2.0, 15.0))
    theirs = sum(peer.end_window(f"w{number}", sync_execution=False).gpu_energy.values())
    bare = ours.read().energy_J - bare
    end_s = clock.now_s
    closed = ours.boundary(opens=False)
    rows.append({"zeus_J": theirs, "bare_J": bare, "ours_J": closed.energy_J - opened.energy_J,
                 "truth_J": fake.true_energy_J(start_s, end_s)})
print("RESULT" + json.dumps({"version": zeus.__version__, "rows": rows}))
"""


def python_with_zeus(folder: Path) -> Path:
    """A new environment with Zeus in it; its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "zeus", "nvidia-ml-py", "numpy"]
    subprocess.run(install, check=True)
    return python


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("agreement with Zeus on the same fake GPUs")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--python", type=Path, help="an interpreter that has Zeus already")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        python = options.python or python_with_zeus(Path(folder) / "zeus")
        paths = os.environ | {"PYTHONPATH": str(ROOT)}
        paths.pop("CUDA_VISIBLE_DEVICES", None)
        done = finished([str(python), "-c", SCRIPT, str(options.windows)], env=paths)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        sys.exit(f"Zeus did not run: {done.stderr[-2000:]}")
    found = json.loads(lines[0].removeprefix("RESULT"))
    rows = found["rows"]
    print(f"zeus {found['version']}, {len(rows)} windows of 2 to 15 s on two fake GPUs")

    def worst(name: str, against: str) -> float:
        return max(abs(row[name] / row[against] - 1) for row in rows) * 100

    publish(
        [
            Figure("windows", len(rows), "count"),
            Figure("zeus_and_counter_differ_at_most", worst("bare_J", "zeus_J"), "%"),
            Figure("zeus_off_the_truth_at_most", worst("zeus_J", "truth_J"), "%"),
            Figure("joulefront_off_the_truth_at_most", worst("ours_J", "truth_J"), "%"),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()

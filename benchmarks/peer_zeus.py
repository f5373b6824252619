"""Agreement with Zeus: the energy of the same windows of the same GPUs.

Zeus (PyPI `zeus`) is the established tool for this measurement. It cannot share an environment with
Ray (its `amdsmi` breaks `import ray`), so it is installed in a temporary one, where both meters
read the NVML of one twin node in virtual time. A window's energy by the bare counter must agree to
the millijoule; the meter's own boundaries, which are finer than the counter's steps, are compared
with the exact truth of the node.
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
from tuner.testing.twin import TwinGpu, TwinNode

#: Runs inside the other environment: prints a JSON list of windows.
SCRIPT = """
import json, random, sys
import zeus
from zeus.monitor import ZeusMonitor
from tuner.testing.twin import TwinNode
from tuner.workload.meters.nvml import NvmlMeter
draw = random.Random(0)
node = TwinNode.of_environment()
def run(seconds):
    until_s = node.clock() + seconds
    while node.clock() < until_s:
        node.set(0, load=draw.choice((0.0, 0.4, 1.0)))
        node.sleep(min(draw.uniform(0.2, 0.6), until_s - node.clock()))
peer = ZeusMonitor(gpu_indices=[0, 1], cpu_indices=[])
ours = NvmlMeter(clock=node.clock, sleep=node.sleep, environ={})
rows = []
for number in range(int(sys.argv[1])):
    run(draw.uniform(0.1, 1.0))
    opened, start_J = ours.boundary(opens=True), node.energy_J()
    bare = ours.read().energy_J
    peer.begin_window(f"w{number}", sync_execution=False)
    run(draw.uniform(2.0, 15.0))
    theirs = sum(peer.end_window(f"w{number}", sync_execution=False).gpu_energy.values())
    bare = ours.read().energy_J - bare
    truth_J = node.energy_J() - start_J
    closed = ours.boundary(opens=False)
    rows.append({"zeus_J": theirs, "bare_J": bare, "ours_J": closed.energy_J - opened.energy_J,
                 "truth_J": truth_J})
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
    parser = arguments("agreement with Zeus on the same twin GPUs")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--python", type=Path, help="an interpreter that has Zeus already")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        python = options.python or python_with_zeus(Path(folder) / "zeus")
        gpus = TwinGpu(), TwinGpu(peak_W=310.0, counter_period_s=0.05, load=0.7)
        node = TwinNode(Path(folder) / "node", gpus)
        environ = os.environ | node.environment() | {"PYTHONPATH": str(ROOT)}
        environ.pop("CUDA_VISIBLE_DEVICES", None)
        done = finished([str(python), "-c", SCRIPT, str(options.windows)], env=environ)
        node.close()
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        sys.exit(f"Zeus did not run: {done.stderr[-2000:]}")
    found = json.loads(lines[0].removeprefix("RESULT"))
    rows = found["rows"]
    print(f"zeus {found['version']}, {len(rows)} windows of 2 to 15 s on two twin GPUs")

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

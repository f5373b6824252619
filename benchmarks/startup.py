"""Start-up times of the command and of the import, as a user waits for them.

Each is a process of its own, so that nothing is warm but the disk; the median of several runs in
turn.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.figures import Figure, arguments, publish

COMMANDS = {
    "python_alone_s": [sys.executable, "-c", "pass"],
    "import_tuner_s": [sys.executable, "-c", "import tuner"],
    "import_optimize_s": [sys.executable, "-c", "import tuner; tuner.optimize"],
    "tuner_help_s": [sys.executable, "-c", "from tuner.cli.main import main; main(['--help'])"],
}
#: Modules that neither the import nor the command's help may import.
HEAVY = ("torch", "deepspeed", "transformers", "ray", "optuna", "sklearn", "scipy", "numpy")
HEAVY += ("plotly", "pandas")


def main() -> None:
    parser = arguments(__doc__, "startup")
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.runs):
        for name, command in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - began)
    for name, values in seconds.items():
        print(f"{name:17} median {statistics.median(values):.3f} s, worst {max(values):.3f} s")
    heavy = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, tuner, tuner.cli.main; tuner.optimize; "
            f"print(*[m for m in {HEAVY!r} if m in sys.modules])",
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    print("heavy modules imported by `import tuner`:", ", ".join(heavy) or "none")
    figures = [Figure(name, statistics.median(values), "s") for name, values in seconds.items()]
    publish([*figures, Figure("heavy_modules", len(heavy), "count")], options.json)


if __name__ == "__main__":
    main()

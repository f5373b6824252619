"""One search over a training script, by the interpreter of the benchmark's environment.

`python -m benchmarks.scripts.search ARGUMENTS` with the arguments as JSON; progress and the answer
are printed as `tuner optimize` prints them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tuner
from tuner.display.progress import ProgressPrinter
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.errors import InputError
from tuner.workload.probe import WindowPolicy

#: Steps take milliseconds here, and meters on a CPU need no long windows.
WINDOW = WindowPolicy(min_s=1.0, max_s=4.0, settle_s=0.3)


@dataclass(frozen=True)
class Asked:
    """Arguments of one search.

    Attributes:
        command: as it is pasted.
        name: of the run.
        runs: the folder of runs.
        probes: the number of probes.
        global_batch: samples of a step; 0 if the command shows it.
        knobs: packs or declarations.
    """

    command: str
    name: str
    runs: str
    probes: int
    global_batch: int
    knobs: tuple[str, ...]


def main() -> None:
    asked = Asked(**json.loads(sys.argv[1]))
    script = tuner.Script(asked.command, global_batch=asked.global_batch or None)
    result = tuner.optimize(
        script,
        search=SearchSettings(max_probes=asked.probes, window=WINDOW),
        knobs=asked.knobs,
        executor="inline",
        name=asked.name,
        runs_dir=Path(asked.runs),
        report=False,
        progress=False,
        on_progress=ProgressPrinter(sys.stdout),
    )
    print(result.headline if result.recommendation else result.stopped)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(str(error))

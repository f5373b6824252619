"""Run a command on a twin GPU node: `python -m tests.twin -- tuner optimize ...`.

The command finds GPUs by NVML as on a real node, its ranks compute on cores at the speed of their
GPU's clock, and every energy that it prints is marked "twin".
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.twin.node import TwinNode
from tests.twin.specimens import CORE_GPU


def main(argv: Sequence[str] | None = None) -> int:
    """Make a node, run the command on it and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.twin", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--gpus", type=int, default=2, help="GPUs of the node (default: 2)")
    parser.add_argument("--cores", type=int, help="cores of the node (default: 8 for each GPU)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")
    options = parser.parse_args(argv)
    command = [word for i, word in enumerate(options.command) if i or word != "--"]
    if not command:
        parser.error("name a command, e.g. -- tuner doctor")
    with tempfile.TemporaryDirectory() as folder:
        # As a node with such GPUs has. Its ranks compute on the cores of this machine.
        cores = 8 * options.gpus if options.cores is None else options.cores
        path, gpus = Path(folder) / "node", [CORE_GPU] * options.gpus
        node = TwinNode(path, gpus, virtual_time=False, cores=cores)
        try:
            code = subprocess.run(command, env=os.environ | node.environment()).returncode
            if (late_s := node.late_s()) > 1:
                print(
                    f"twin: the GPUs waited {late_s:.0f} s for ranks whose cores are too slow for "
                    "them; such steps follow no law, so take a smaller model",
                    file=sys.stderr,
                )
            return code
        finally:
            node.close()


if __name__ == "__main__":
    sys.exit(main())

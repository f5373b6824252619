"""Run a command on a twin GPU node: `python -m tuner.testing.twin -- tuner optimize ...`.

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

from tuner.testing.twin.node import TwinNode
from tuner.testing.twin.specimens import CORE_GPU

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Make a node, run the command on it and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tuner.testing.twin", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--gpus", type=int, default=2, help="GPUs of the node (default: 2)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")
    options = parser.parse_args(argv)
    command = [word for i, word in enumerate(options.command) if i or word != "--"]
    if not command:
        parser.error("name a command, e.g. -- tuner doctor")
    with tempfile.TemporaryDirectory() as folder:
        node = TwinNode(Path(folder) / "node", [CORE_GPU] * options.gpus, virtual_time=False)
        try:
            return subprocess.run(command, env=os.environ | node.environment()).returncode
        finally:
            node.close()


if __name__ == "__main__":
    sys.exit(main())

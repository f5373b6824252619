"""Write the golden outputs: `python -m tests.golden --write [NAME ...]`.

What is sampled from a posterior depends on the BLAS kernel that the processor gets, so one that
every x86-64 processor with AVX2 has is asked for before NumPy is imported.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

KERNEL = {"OPENBLAS_CORETYPE": "Haswell"}


def write() -> None:
    """Write the outputs of the named runs."""
    from tests.golden import NAMES, OUTPUTS, outputs

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (all)")
    parser.add_argument("--write", action="store_true", required=True)
    parser.add_argument("--out", type=Path, default=OUTPUTS, help="folder (tests/golden/outputs)")
    options = parser.parse_args()
    for name in options.names or NAMES:
        with tempfile.TemporaryDirectory() as work:
            (options.out / f"{name}.txt").write_text(outputs(name, Path(work)), encoding="utf-8")


if __name__ == "__main__":
    if not KERNEL.items() <= os.environ.items():
        arguments = [sys.executable, "-m", "tests.golden", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, **KERNEL})
    write()

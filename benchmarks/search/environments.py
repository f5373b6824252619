"""Virtual environments for samplers whose packages do not go with this project's.

A folder holds one environment for each, by name. `install` makes what is missing in it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import ROOT

#: Environment variable with the folder of the virtual environments.
PEERS_VARIABLE = "JOULEFRONT_PEERS"
#: Seconds that one call of pip may take.
MOST_S = 600.0


@dataclass(frozen=True)
class Environment:
    """What is installed for a sampler.

    Attributes:
        packages: requirements; a bare name that `constraints.txt` pins gets this version.
        alone: requirements that are installed without what they require.
        module: is imported to see that the installation works.
    """

    packages: tuple[str, ...]
    module: str
    alone: tuple[str, ...] = ()


#: HEBO 0.3.6 requires NumPy below 1.25, GPy and CatBoost, for which pip finds no solution beside a
#: current PyTorch in minutes. The optimiser that is used needs none of the last two.
ENVIRONMENTS = {
    "smac3": Environment(("smac==2.4.1",), "smac"),
    "hebo": Environment(
        ("torch", "gpytorch", "numpy<2", "pandas<3", "scikit-learn", "pymoo==0.6.0"),
        "hebo.optimizers.general",
        ("hebo==0.3.6", "disjoint-set"),
    ),
    "kernel_tuner": Environment(("kernel-tuner==1.5.0",), "kernel_tuner"),
}


def python_of(name: str) -> Path:
    """Return the Python of an environment, whether it exists or not."""
    return Path(os.environ.get(PEERS_VARIABLE, "")) / name / "bin" / "python"


def _pinned(package: str) -> str:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(package)}==\S+", pins, re.MULTILINE)
    return found.group() if found else package


def install(name: str, most_s: float = MOST_S) -> str:
    """Make an environment in the folder of `PEERS_VARIABLE` unless it works already.

    Args:
        name: of `ENVIRONMENTS`.
        most_s: seconds that one call of pip may take.

    Returns:
        Why it could not be made; "" if it works.
    """
    python, wanted = python_of(name), ENVIRONMENTS[name]
    made = not python.is_file()
    try:
        if made:
            venv.create(python.parent.parent, with_pip=True)
            pip = [str(python), "-m", "pip", "install", "--quiet"]
            _call([*pip, *map(_pinned, wanted.packages)], most_s)
            if wanted.alone:
                _call([*pip, "--no-deps", *wanted.alone], most_s)
        _call([str(python), "-c", f"import {wanted.module}"], most_s)
        return ""
    except subprocess.TimeoutExpired:
        reason = f"its installation did not end within {most_s:.0f} s"
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines()
        reason = f"its installation failed: {said[-1] if said else error}"
    if made:
        shutil.rmtree(python.parent.parent, ignore_errors=True)
    return reason


def _call(command: list[str], most_s: float) -> None:
    print(f"{' '.join(command)}", file=sys.stderr)
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=most_s)

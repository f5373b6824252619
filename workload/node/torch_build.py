"""Facts of a torch, by which a platform finds out before the first probe if it can use its devices.

The venv of a machine may hold torch for CPUs, one whose CUDA is newer than the driver, or one
without code for the card. Each would end every rank of every probe with a different error.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TorchBuild:
    """Facts of an imported torch: CUDA's release ("13.0" or empty), codes such as "sm_80 sm_90"."""

    version: str
    cuda: str
    architectures: str = ""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return True if it has code for this compute capability.

        Binaries (sm_XY) run on later minor versions of their major one, intermediate code
        (compute_XY) on everything later (CUDA programming guide, "Application Compatibility").
        """
        found = re.findall(r"\b(sm|compute)_(\d+)(\d)\b", self.architectures)
        codes = [(kind, (int(major), int(minor))) for kind, major, minor in found]
        return not codes or any(
            code <= capability and (kind == "compute" or code[0] == capability[0])
            for kind, code in codes
        )


def installed_torch() -> TorchBuild | None:
    """Return the facts of the installed torch, read from its files; None if there is none."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        try:
            text = (Path(folder) / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        version = re.search(r"^__version__ = '([^']*)'", text, flags=re.MULTILINE)
        cuda = re.search(r"^cuda\b[^=]*= '([^']*)'", text, flags=re.MULTILINE)
        return TorchBuild(version.group(1) if version else "", cuda.group(1) if cuda else "")
    return None

"""Check that the installed torch can use this node's GPUs, before the first probe starts.

The venv of a machine may hold torch for CPUs, one whose CUDA is newer than the driver, or one
without code for the card. Each would end every rank of every probe with a different error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.workload.meters.errors import MeterError
from tuner.workload.meters.gpus import ask, open_nvml, visible_gpus


@dataclass(frozen=True)
class TorchBuild:
    """Facts of a torch that is imported without CUDA having been started.

    Attributes:
        cuda: the CUDA release that it is built with, e.g. "13.0"; empty for a CPU build.
        architectures: what it has code for, e.g. "sm_80 sm_90 compute_90"; empty if unknown.
    """

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


def why_torch_cannot_use_gpus(
    build: TorchBuild, *, nvml: Any = None, environ: Mapping[str, str] | None = None
) -> str:
    """Return one sentence if torch cannot use the visible GPUs, else an empty string.

    Raises:
        InputError: the GPUs cannot be used as named.
    """
    if not build.cuda:
        return (
            f"torch {build.version} is built without CUDA; install a build with CUDA "
            "(https://pytorch.org/get-started/locally)"
        )
    try:
        nvml = open_nvml(nvml)
    except MeterError:
        return ""
    try:
        offered = ask(nvml, 0, lambda: nvml.nvmlSystemGetCudaDriverVersion_v2())
        if offered and offered // 1000 < int(build.cuda.partition(".")[0]):
            driver = ask(nvml, "", lambda: nvml.nvmlSystemGetDriverVersion())
            return (
                f"torch {build.version} is built with CUDA {build.cuda}, and the driver {driver} "
                f"supports CUDA {offered // 1000}.{offered % 1000 // 10}; update the driver or "
                "install a torch that is built with an older CUDA"
            )
        for gpu in visible_gpus(nvml, environ=environ):
            told = ask(nvml, None, lambda: nvml.nvmlDeviceGetCudaComputeCapability(gpu.handle))  # noqa: B023
            if told is not None and not build.runs_on((told[0], told[1])):
                return (
                    f"torch {build.version} has no code for {gpu.name} (compute capability "
                    f"{told[0]}.{told[1]}), only for {build.architectures}; install a build that "
                    "has it"
                )
    finally:
        ask(nvml, None, nvml.nvmlShutdown)
    return ""

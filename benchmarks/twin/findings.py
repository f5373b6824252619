"""The findings of three audits of the GPU path, each with what tells if it is mended.

A finding is checked on the twin node (`benchmarks.twin.checks`), by the tests that are named for it
(`benchmarks.twin.named_tests`), or both. One without either, or with a part that neither covers,
counts as open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.twin import checks
from benchmarks.twin.named_tests import Outcome


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        number: in the audit.
        title: the fault.
        check: returns what is wrong on the twin node, or an empty string; None: there is no check.
        remains: parts that neither the check nor a test covers; empty if all are covered.
    """

    number: int
    title: str
    check: Callable[[], str] | None = None
    remains: str = ""

    def state(self, tests: Outcome) -> str:
        """Return "" if mended, else why it is open.

        Args:
            tests: outcome of the tests that are named for it.
        """
        if self.check is not None and (fault := self.check()):
            return fault
        if tests.failed:
            return f"failed: {', '.join(tests.failed)}"
        if self.check is None and not tests.passed:
            return "nothing checks it"
        return self.remains and f"nothing checks {self.remains}"

    def means(self, tests: Outcome) -> str:
        """Return what checks it, e.g. "twin node, 3 tests"."""
        told = ["twin node"] if self.check is not None else []
        if count := tests.passed + len(tests.failed):
            told.append(f"{count} test{'s' if count > 1 else ''}")
        return ", ".join(told)


FINDINGS = (
    Finding(1, "DeepSpeed before 0.19.4 starts CUDA in the fork server", checks.driver_started),
    Finding(2, "weights are drawn on one CPU core a rank"),
    Finding(3, "a first step has the limit of a step"),
    Finding(4, "UUIDs in CUDA_VISIBLE_DEVICES end ZeRO 1 and 2", checks.uuids),
    Finding(5, "AsyncIOBuilder starts CUDA in the fork server, or needs nvcc", checks.built_op),
    Finding(6, "a card with a display is refused", checks.display),
    Finding(7, "delivered clocks include idle GPUs", checks.idle_clocks),
    Finding(8, "zeusd 0.3 and later answer 404", checks.zeusd),
    Finding(9, "ranks inherit an NVML that is not initialised", checks.nvml_kept),
    Finding(10, "probes cost global batches"),
    Finding(11, "step ends between boundaries are host times"),
    Finding(12, "a closing boundary subtracts its wait at a stale power", checks.edges),
    Finding(
        13,
        "nothing asks if torch can use the GPU",
        checks.unusable_torch,
    ),
    Finding(
        14,
        "OMP threads count cores that were not granted",
        checks.threads,
    ),
    Finding(
        15,
        "GH200: module counters, memory of HBM nodes, C2C links",
        checks.superchip,
    ),
    Finding(
        16,
        "assumed peaks, the clock of a device left alone, listed clocks that are never reached",
        checks.assumed_clocks,
    ),
    Finding(
        17,
        "out-of-memory errors of CUDA libraries are read as crashes",
        checks.library_memory,
    ),
    Finding(
        18,
        "device order, boundaries of other devices, NCCL's interface, folders of ops",
        checks.order_and_interface,
    ),
    Finding(19, "the built-in program is plain transformers and DeepSpeed"),
    Finding(20, "idle power, idle locks, lost locks and other smaller ones"),
)

#: Findings of the second audit, by number.
SECOND_DAY = {
    1: Finding(1, "asking a CUDA build of torch for its architectures spoils the fork"),
    2: Finding(2, "ranks take over the task variables of Slurm, PMI or Open MPI"),
    3: Finding(3, "a GPU that may not be used, or is lost, takes the node away", checks.hidden_gpu),
    4: Finding(4, "NVML that does not start makes a CPU study of a GPU node", checks.mismatch),
    7: Finding(7, "ECC, Xid and NVLink errors are blamed on the configuration", checks.damage),
    8: Finding(8, "inline studies, probe and calibrate never ask who else uses the GPU"),
    11: Finding(11, "the twin's truth is that of another launch, in seconds of a CPU"),
    12: Finding(12, "cuda_touches is measured with a torch that has no CUDA"),
    13: Finding(13, "as root, every look and probe writes the power limit", checks.looking),
    14: Finding(14, "zeusd's answer for 'not supported' gives the node up"),
    15: Finding(15, "SuperOffload's worker is a second CUDA process that nothing counts"),
    16: Finding(
        16,
        "calls that drivers of CUDA 14 lack; power profiles of Blackwell; modules of two GPUs",
    ),
    5: Finding(5, "ranks share one core under Slurm, and nothing looks"),
    6: Finding(6, "the binding of today's command is dropped, and none is offered"),
    9: Finding(9, "clocks.sh: a GPU without persistence mode forgets its lock"),
    10: Finding(10, "Ray's memory monitor ends the agent, learnt as a crash"),
}

#: Findings of the third audit: fleets, workstations and laptops.
THIRD_DAY = (
    Finding(1, "the built-in program does not start below transformers 5"),
    Finding(2, "power that falls slowly after work is counted as work"),
    Finding(3, "doctor is ready where every study is refused"),
    Finding(4, "a GPU without a memory of its own (GB10) is refused"),
    Finding(5, "without a power limit the predicted power is 0 W"),
    Finding(6, "a GPU that takes no settings costs the search"),
    Finding(7, "the gate over the preloads is broken"),
    Finding(8, "a timeline that ends is not noticed"),
    Finding(9, "one NVML call that fails costs a probe"),
    Finding(10, "a neighbour below 5 % of the memory is not seen"),
    Finding(11, "a binding whose process records have 32 bytes is accepted"),
    Finding(12, "behind a lost GPU ranks are numbered as if it were certain"),
    Finding(13, "pending remaps, recovery actions, the fabric and enforced limits are not asked"),
    Finding(14, "another package named pynvml ends in a traceback"),
    Finding(15, "NVLink is read off one GPU; H20 is taken for 633 TFLOP/s"),
)

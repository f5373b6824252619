"""Findings of three audits of the GPU path: each is mended if the tests named for it pass.

A finding without a test that passes is open (`benchmarks.twin.named_tests`).
"""

#: Findings of the first audit, by number. The 10th is open: steps extrapolated from few
#: micro-batches were too inaccurate, and went (docs/develop/benchmarks.md).
FINDINGS = {
    1: "DeepSpeed before 0.19.4 starts CUDA in the fork server",
    2: "weights are drawn on one CPU core a rank",
    3: "a first step has the limit of a step",
    4: "UUIDs in CUDA_VISIBLE_DEVICES end ZeRO 1 and 2",
    5: "AsyncIOBuilder starts CUDA in the fork server, or needs nvcc",
    6: "a card with a display is refused",
    7: "delivered clocks include idle GPUs",
    8: "zeusd 0.3 and later answer 404",
    9: "ranks inherit an NVML that is not initialised",
    10: "probes cost global batches",
    11: "step ends between boundaries are host times",
    12: "a closing boundary subtracts its wait at a stale power",
    13: "nothing asks if torch can use the GPU",
    14: "OMP threads count cores that were not granted",
    15: "GH200: module counters, memory of HBM nodes, C2C links",
    16: "assumed peaks, the clock of a device left alone, listed clocks that are never reached",
    17: "out-of-memory errors of CUDA libraries are read as crashes",
    18: "device order, boundaries of other devices, NCCL's interface, folders of ops",
    19: "the built-in program is plain transformers and DeepSpeed",
    20: "idle power, idle locks, lost locks and other smaller ones",
}
#: Findings of the second.
SECOND_DAY = {
    1: "asking a CUDA build of torch for its architectures spoils the fork",
    2: "ranks take over the task variables of Slurm, PMI or Open MPI",
    3: "a GPU that may not be used, or is lost, takes the node away",
    4: "NVML that does not start makes a CPU study of a GPU node",
    5: "ranks share one core under Slurm, and nothing looks",
    6: "the binding of today's command is dropped, and none is offered",
    7: "ECC, Xid and NVLink errors are blamed on the configuration",
    8: "inline studies, probe and calibrate never ask who else uses the GPU",
    9: "clocks.sh: a GPU without persistence mode forgets its lock",
    10: "Ray's memory monitor ends the agent, learnt as a crash",
    11: "the twin's truth is that of another launch, in seconds of a CPU",
    12: "cuda_touches is measured with a torch that has no CUDA",
    13: "as root, every look and probe writes the power limit",
    14: "zeusd's answer for 'not supported' gives the node up",
    15: "SuperOffload's worker is a second CUDA process that nothing counts",
    16: "calls that drivers of CUDA 14 lack; power profiles of Blackwell; modules of two GPUs",
}
#: Findings of the third: fleets, workstations and laptops.
THIRD_DAY = {
    1: "the built-in program does not start below transformers 5",
    2: "power that falls slowly after work is counted as work",
    3: "doctor is ready where every study is refused",
    4: "a GPU without a memory of its own (GB10) is refused",
    5: "without a power limit the predicted power is 0 W",
    6: "a GPU that takes no settings costs the search",
    7: "the gate over the preloads is broken",
    8: "a timeline that ends is not noticed",
    9: "one NVML call that fails costs a probe",
    10: "a neighbour below 5 % of the memory is not seen",
    11: "a binding whose process records have 32 bytes is accepted",
    12: "behind a lost GPU ranks are numbered as if it were certain",
    13: "pending remaps, recovery actions, the fabric and enforced limits are not asked",
    14: "another package named pynvml ends in a traceback",
    15: "NVLink is read off one GPU; H20 is taken for 633 TFLOP/s",
}


def by_key() -> dict[str, str]:
    """Return the titles by the key that tests name."""
    return {
        f"{audit}_{number}": title
        for audit, titles in (
            ("finding", FINDINGS),
            ("second_day", SECOND_DAY),
            ("third_day", THIRD_DAY),
        )
        for number, title in titles.items()
    }

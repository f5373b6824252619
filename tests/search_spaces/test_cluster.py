"""Facts about devices and clusters."""

from dataclasses import replace

from tuner.search_spaces.cluster import load_cluster, load_device


def test_a_core_shares_the_memory_of_its_host() -> None:
    core, gpu = load_cluster("cpu-2").device, load_device("H100-SXM-80GB")
    assert (core.is_gpu, core.plural, core.memory_limit_bytes) == (False, "cores", None)
    assert (gpu.is_gpu, gpu.plural, gpu.memory_limit_bytes) == (True, "GPUs", gpu.memory_bytes)
    assert replace(gpu, memory_bytes=0).memory_limit_bytes is None  # unknown, and no limit of 0

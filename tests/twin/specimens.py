"""Twin GPUs with a character: the one that ranks on cores keep busy."""

from __future__ import annotations

from tests.twin.gpu import TwinGpu

#: A GPU whose ranks compute on cores, which are a few times as fast. Sensors and counter are those
#: of an A100 as it was measured (arXiv 2312.02741: 25 ms of every 100 ms). `cores` and clocks
#: give the peak that joulefront assumes of an unknown GPU (cores x clock x 8 FLOP): about what a
#: share of a core does in fp32.
CORE_GPU = TwinGpu(
    name="joulefront twin",
    memory_bytes=8 * 2**30,
    reserved_bytes=64 * 2**20,
    cores=1,
    bus_bits=16,
    compute=(7, 5),  # clocks can be locked from Volta on
    pcie_generation=3,
    pcie_width=4,
    nvlinks=0,
    clock_MHz=tuple(range(510, 1411, 100)),
    peak_W=340.0,
    switch_s=0.05,
    filter_s=0.05,
    sensor_period_s=0.1,
    sensor_window_s=0.025,
    counter_delay_s=0.02,
    step_s=0.04,
    micro_batch_s=0.02,
    sample_s=0.03,
    clock_free_share=0.2,
)

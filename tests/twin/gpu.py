"""Specification of a twin GPU."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tests.twin import layout

#: NVML's architecture numbers by major compute capability (NVML API reference); 8.9 is Ada.
ARCHITECTURES = {6: 4, 7: 5, 8: 7, 9: 9, 10: 10, 12: 10}


@dataclass(frozen=True)
class TwinGpu:
    """Specification of one twin GPU; an A100 with ideal sensors by default.

    Attributes:
        reserved_bytes: memory that the driver keeps for itself.
        pci_bus: number of the bus; 0 takes the next.
        mig: number of MIG slices, each with an eighth of the memory; -1: MIG is on without any; 0:
            it is off.
        clock_MHz, memory_MHz: the clocks on offer, ascending.
        peak_W: draw at the highest clock and full load (may be above the limit: it is then capped).
        leak_per_K: growth of the idle power by kelvin above 30 degrees.
        heat_K_per_W, heat_s: thermal resistance and time constant.
        slowdown_C: temperature from which the clock is lowered.
        reach_MHz: listed clocks above this are never delivered under load, and NVML gives no
            reason (a consumer card's voltage limiter); 0: all are reached.
        switch_s: latency of a change of clock.
        filter_s: time constant between the true power and what the sensors and the counter see.
        sensor_period_s, sensor_window_s: interval between the power sensor's updates, and the span
            that each one averages.
        averaged_s: span of the averaged power.
        counter_period_s, counter_delay_s: interval between the counter's updates, and the age of
            the energy that an update publishes.
        phase_s: the first tick of sensor and counter, in periods.
        module_W: draw of the superchip's module besides the GPU; 0: it sits on no module.
        counter_is_module, usage_is_module: what the counter and nvmlDeviceGetPowerUsage cover.
        gpu_scope: power of the scope "GPU" is 0: not offered, 1: the GPU's, 2: the module's.
        idle_follows: an idle GPU stands at a locked clock; else it falls to the lowest.
        application_free: any user may set application clocks.
        default_application_MHz: default application clock; 0: the call is not supported.
        has_ecc: memory errors are counted; rows are remapped from Ampere on, pages retired before.
        tells_memory: NVML tells memory; a superchip with one memory for both does not (GB10).
        tells_limit: NVML tells power limits; laptops' GPUs do not.
        lists_clocks: NVML lists supported clocks; vGPUs and some laptops' GPUs do not.
        enforced_limit_W: a lower limit that the board or the module enforces; 0: none.
        smoothing: power smoothing is off (0) or on (1); -1: not supported.
        ramp_W_per_s, hold_s: rate at which power falls after work, and how long it stays before
            that, as power smoothing has it; 0: at once.
        counter_share: energy that the counter counts, as a share of the true one.
        sensor_stuck_W: power at which the sensor stands still; 0: it follows the true one.
        recovery_action, fabric_state, link_recoveries: NVML's code of the action that the GPU waits
            for (0: none), the state of its NVLink fabric (3: completed), and the recoveries of its
            links; -1: not supported.
        power_profiles: mask of the workload power profiles in effect, e.g. 2 for Max-Q; -1:
            not supported.
        persistence: persistence mode; without it settings are lost when the last client closes.
        start_s, start_busy_s: time that the first client's nvmlInit then takes for this GPU, and
            how long it is told as utilisation afterwards.
        fabric_status, compute_mode: NVML's code with which the registration at the fabric ended,
            and its compute mode (0: default, 2: prohibited, 3: exclusive process).
        memory_node: the nearest memory node; -1: NVML supports neither question.
        numa_node: the memory node that the GPU's own memory is to Linux, as on a superchip; -1:
            none, and the question is not supported.
        load: utilisation, until `TwinNode.set` changes it.
        step_s, micro_batch_s, sample_s: device time at the highest clock of each optimizer step of
            a rank, of each of its micro-batches, and of each sample in it. If any is given, the
            load is that of ranks, which wait for the device at the end of each step (`rank.c`); a
            sample is shared by the ranks of its replica.
        clock_free_share: share of that work that is bound by memory and does not follow the clock.
    """

    name: str = "NVIDIA A100-SXM4-80GB"
    uuid: str = ""
    memory_bytes: int = 80 * 2**30
    reserved_bytes: int = 400 * 2**20
    used_bytes: int = 0
    pci_bus: int = 0
    cores: int = 6912
    bus_bits: int = 5120
    compute: tuple[int, int] = (8, 0)
    pcie_generation: int = 4
    pcie_width: int = 16
    nvlinks: int = 12
    c2c: bool = False
    mig: int = 0
    clock_MHz: tuple[int, ...] = tuple(range(210, 1411, 15))
    memory_MHz: tuple[int, ...] = (1593,)
    idle_W: float = 60.0
    peak_W: float = 380.0
    leak_per_K: float = 0.0
    limit_W: float = 400.0
    default_limit_W: float = 400.0
    min_limit_W: float = 100.0
    max_limit_W: float = 400.0
    ambient_C: float = 28.0
    heat_K_per_W: float = 0.1
    heat_s: float = 20.0
    slowdown_C: float = 85.0
    reach_MHz: float = 0.0
    switch_s: float = 0.0
    filter_s: float = 0.0
    sensor_period_s: float = 0.0
    sensor_window_s: float = 0.001
    averaged_s: float = 1.0
    counter_period_s: float = 0.1
    counter_delay_s: float = 0.0
    phase_s: float = 0.0
    module_W: float = 0.0
    memory_share: float = 0.0
    counter_start_mJ: int = 987_654_321
    counter_modulus_mJ: int = 0
    has_counter: bool = True
    counter_is_module: bool = False
    has_usage: bool = True
    usage_is_module: bool = False
    gpu_scope: int = 1
    lockable: bool = True
    ignores_lock: bool = False
    limit_settable: bool = True
    ignores_limit: bool = False
    idle_follows: bool = True
    application_free: bool = False
    default_application_MHz: int = 0
    has_ecc: bool = True
    tells_memory: bool = True
    tells_limit: bool = True
    lists_clocks: bool = True
    enforced_limit_W: float = 0.0
    smoothing: int = -1
    ramp_W_per_s: float = 0.0
    hold_s: float = 0.0
    counter_share: float = 1.0
    sensor_stuck_W: float = 0.0
    recovery_action: int = -1
    fabric_state: int = -1
    link_recoveries: int = -1
    power_profiles: int = -1
    persistence: bool = True
    start_s: float = 0.0
    start_busy_s: float = 0.0
    fabric_status: int = 0
    compute_mode: int = 0
    cpus: tuple[int, ...] = ()
    memory_node: int = -1
    numa_node: int = -1
    load: float = 0.0
    step_s: float = 0.0
    micro_batch_s: float = 0.0
    sample_s: float = 0.0
    clock_free_share: float = 0.0

    def write(self, gpu: layout.Gpu, index: int) -> None:
        """Fill in the state of GPU `index`."""
        for entry in fields(self):
            value: Any = getattr(self, entry.name)
            if entry.name == "compute":
                gpu.compute_major, gpu.compute_minor = value
                gpu.architecture = 8 if value == (8, 9) else ARCHITECTURES.get(value[0], 9)
            elif entry.name == "cpus":
                for cpu in value:
                    gpu.cpus[cpu // 64] |= (1 << cpu % 64) - (2**64 if cpu % 64 == 63 else 0)
            elif entry.name in ("clock_MHz", "memory_MHz"):
                array = getattr(gpu, entry.name)
                array[: len(value)] = value
            elif isinstance(value, str):
                setattr(gpu, entry.name, value.encode())
            else:
                setattr(gpu, entry.name, value)
        gpu.clocks, gpu.memory_clocks = len(self.clock_MHz), len(self.memory_MHz)
        gpu.uuid = (self.uuid or f"GPU-{index:08x}-aaaa-bbbb-cccc-0123456789ab").encode()
        gpu.pci_bus = self.pci_bus or 0x10 * (index + 1)
        gpu.started = self.persistence

"""The state file's layout: a mirror of csrc/state.h, checked against the library when it loads."""

from __future__ import annotations

import ctypes
from typing import Any

MAGIC = 0x4E495754
MAX_GPUS, MAX_CLOCKS, MAX_MEMORY_CLOCKS, MAX_PROCESSES, MAX_RANKS = 16, 256, 8, 16, 16
MAX_FAULTS, MAX_LOG, MAX_CLIENTS = 128, 1024, 64
MAX_WORK, KEPT_STEPS = 64, 8
RING, MAX_ROWS, COLUMNS = 4096, 6000, 10

MAX_CPUS = 1024

_TEXT = {"uuid": 80, "name": 96, "driver_version": 80}


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [
        (name, ctypes.c_char * _TEXT[name] if kind is ctypes.c_char else kind)
        for name in names.split()
    ]


def _i(names: str) -> list[tuple[str, Any]]:
    return _fields(ctypes.c_int64, names)


def _d(names: str) -> list[tuple[str, Any]]:
    return _fields(ctypes.c_double, names)


def _t(names: str) -> list[tuple[str, Any]]:
    return _fields(ctypes.c_char, names)


class Process(ctypes.Structure):
    """A process on a GPU."""

    _fields_ = _i("pid bytes")


class Rank(ctypes.Structure):
    """A training process on a GPU."""

    _fields_ = [("pid", ctypes.c_int64), ("done_s", ctypes.c_double * KEPT_STEPS)]


class Work(ctypes.Structure):
    """A submitted step."""

    _fields_ = [*_i("pid step"), *_d("left_s")]


class Fault(ctypes.Structure):
    """An injected error."""

    _fields_ = [("name", ctypes.c_char * 56), *_i("gpu code first times calls")]


class Entry(ctypes.Structure):
    """A setter that went through."""

    _fields_ = [("name", ctypes.c_char * 56), *_d("time_s"), *_i("pid gpu a b")]


class Gpu(ctypes.Structure):
    """One GPU: its specification, what was asked of it, what it does."""

    _fields_ = [
        *_t("uuid name"),
        *_i("memory_bytes reserved_bytes pci_bus cores bus_bits compute_major compute_minor"),
        *_i("architecture pcie_generation pcie_width nvlinks c2c mig"),
        *_i("clocks"),
        ("clock_MHz", ctypes.c_int64 * MAX_CLOCKS),
        *_i("memory_clocks"),
        ("memory_MHz", ctypes.c_int64 * MAX_MEMORY_CLOCKS),
        *_d("idle_W peak_W leak_per_K default_limit_W min_limit_W max_limit_W"),
        *_d("ambient_C heat_K_per_W heat_s slowdown_C reach_MHz switch_s filter_s"),
        *_d("sensor_period_s sensor_window_s averaged_s"),
        *_d("counter_period_s counter_delay_s phase_s module_W memory_share"),
        *_i("counter_start_mJ counter_modulus_mJ"),
        *_i("has_counter counter_is_module has_usage usage_is_module gpu_scope"),
        *_i("lockable ignores_lock limit_settable ignores_limit idle_follows application_free"),
        *_i("default_application_MHz has_ecc tells_memory tells_limit lists_clocks"),
        *_d("enforced_limit_W"),
        *_i("smoothing"),
        *_d("ramp_W_per_s hold_s counter_share sensor_stuck_W"),
        *_i("recovery_action fabric_state link_recoveries power_profiles"),
        *_d("start_s start_busy_s"),
        *_i("fabric_status compute_mode"),
        *_d("step_s micro_batch_s sample_s clock_free_share"),
        *_i("memory_node"),
        ("cpus", ctypes.c_int64 * (MAX_CPUS // 64)),
        *_i("numa_node"),
        *_d("load heat_MHz"),
        *_i("lost stalled open_error lock_low lock_high memory_low memory_high"),
        *_i("application_memory application_sm"),
        *_d("limit_W started_s"),
        *_i("persistence started used_bytes compute_count graphics_count"),
        ("compute", Process * MAX_PROCESSES),
        ("graphics", Process * MAX_PROCESSES),
        *((name, ctypes.c_int64 * 2) for name in ("ecc_volatile", "ecc_aggregate", "repaired")),
        *_i("repair_pending rank_count"),
        ("rank", Rank * MAX_RANKS),
        *_i("work_count"),
        ("work", Work * MAX_WORK),
        *_d("time_s energy_J clock_MHz_s busy_s work_s late_s utilisation"),
        *_d("power_W temperature_C clock wanted wanted_s target thermal_MHz regulate_s"),
        *_d("filtered_W filtered_J counter_base_J stalled_J counted_s counted_J ramped_W worked_s"),
        *_i("reasons asked head filled"),
        ("ring_s", ctypes.c_double * RING),
        ("ring_J", ctypes.c_double * RING),
        *_i("row_count"),
        ("row_error", ctypes.c_int64 * COLUMNS),
        ("row", (ctypes.c_double * (1 + COLUMNS)) * MAX_ROWS),
    ]


class Node(ctypes.Structure):
    """The whole file."""

    _fields_ = [
        *_i("magic gpus is_virtual root driver cuda_driver calls descriptor_losses"),
        *_d("epoch_s now_s call_s init_s"),
        *_t("driver_version"),
        *_i("fault_count log_count client_count"),
        ("client", ctypes.c_int64 * MAX_CLIENTS),
        *_i("cores"),
        ("fault", Fault * MAX_FAULTS),
        ("log", Entry * MAX_LOG),
        ("gpu", Gpu * MAX_GPUS),
    ]

"""A made-up tree of the kernel's files by which processors are set and metered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def _write(file: Path, text: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def make_sysfs(
    root: Path,
    *,
    cores: int = 4,
    packages: int = 1,
    listed_kHz: Sequence[int] = (),
    limit_W: float = 28.0,
    shared: int = 1,
) -> Path:
    """Make the files of cpufreq and RAPL, and return `root`.

    Args:
        root: the folder that stands for /sys.
        listed_kHz: the clocks of a driver that lists them; none of intel_pstate and amd-pstate.
        limit_W: long-term power limit of a package; the short-term one is a quarter higher.
        shared: number of cores that share a clock.
    """
    for cpu in range(cores):
        topology = root / f"devices/system/cpu/cpu{cpu}/topology"
        _write(topology / "physical_package_id", cpu * packages // cores)
    for first in range(0, cores, shared):
        policy = root / f"devices/system/cpu/cpufreq/policy{first}"
        members = range(first, min(first + shared, cores))
        _write(policy / "affected_cpus", " ".join(str(cpu) for cpu in members))
        for name, value in (
            ("cpuinfo_min_freq", 800_000),
            ("cpuinfo_max_freq", 3_600_000),
            ("scaling_min_freq", 1_200_000),
            ("scaling_max_freq", 3_400_000),
            ("scaling_cur_freq", 3_100_000),
        ):
            _write(policy / name, value)
        if listed_kHz:
            _write(policy / "scaling_available_frequencies", " ".join(map(str, listed_kHz)))
    for package in range(packages):
        zone = root / f"class/powercap/intel-rapl:{package}"
        for name, text in (
            ("name", f"package-{package}"),
            ("enabled", 1),
            ("energy_uj", 1_000_000),
            ("max_energy_range_uj", 262_143_328_850),
            ("constraint_0_name", "long_term"),
            ("constraint_0_power_limit_uw", round(1e6 * limit_W)),
            ("constraint_1_name", "short_term"),
            ("constraint_1_power_limit_uw", round(1.25e6 * limit_W)),
            ("constraint_2_name", "peak_power"),
            ("constraint_2_power_limit_uw", round(4e6 * limit_W)),
        ):
            _write(zone / name, text)
    return root


def settings_of(root: Path) -> dict[str, str]:
    """Return what every file that holds a setting says, by its path below `root`."""
    files = [
        *root.glob("devices/system/cpu/cpufreq/*/scaling_m*_freq"),
        *root.glob("class/powercap/*/constraint_*_power_limit_uw"),
        *root.glob("class/powercap/*/enabled"),
    ]
    return {str(file.relative_to(root)): file.read_text().strip() for file in files}


def make_proc(root: Path, *, total_gib: int, available_gib: int) -> Path:
    """Make the files of a Linux /proc that tell a host's memory and control group."""
    _write(root / "self" / "cgroup", "0::/")
    memory = {"MemTotal": total_gib, "MemAvailable": available_gib}
    _write(root / "meminfo", "\n".join(f"{n}: {gib * 2**20} kB" for n, gib in memory.items()))
    return root

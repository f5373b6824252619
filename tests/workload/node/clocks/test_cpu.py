"""The governor of processors on a made-up sysfs, and its guard by killing agents for real."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.sysfs import make_sysfs, settings_of
from tests.workload.node.clocks.governor_faults import FAULTS, try_cpu_fault
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName
from tuner.workload.node.clocks.base import (
    FASTEST,
    FixedGovernor,
    Governor,
    GovernorError,
    SetByOthers,
)
from tuner.workload.node.clocks.cpu import CpuGovernor
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.platforms.cores import Cores

CLOCK = "devices/system/cpu/cpufreq/policy{}/scaling_max_freq"
LOWEST = "devices/system/cpu/cpufreq/policy{}/scaling_min_freq"
CAP = "class/powercap/intel-rapl:{}/constraint_{}_power_limit_uw"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.workload.node.clocks.guard.WAIT_S", 0.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_sysfs(tmp_path / "sys")


def governed(root: Path, cpus: range = range(4)) -> CpuGovernor:
    return CpuGovernor(root, cpus=cpus, guarded=False)


class TestCpuGovernor:
    def test_is_a_governor_that_knows_its_clocks_and_limits(self, root: Path) -> None:
        governor = governed(root)
        assert isinstance(governor, Governor)
        assert (governor.can_set, governor.why_not) == (True, "")
        assert governor.supported_clocks_MHz == tuple(range(800, 3601, 100))
        assert (governor.limit_range_W, governor.cores_per_package) == ((14.0, 28.0), 4)
        assert governor.default_clock_MHz == 3400

    def test_sets_reads_back_and_restores(self, root: Path) -> None:
        before = settings_of(root)
        governor = governed(root)
        applied = governor.apply(Settings(clock_MHz=2000, power_limit_W=20))
        assert applied.settings == Settings(clock_MHz=2000, power_limit_W=20)
        now = settings_of(root)
        assert [now[CLOCK.format(n)] for n in range(4)] == ["2000000"] * 4
        assert [now[CAP.format(0, n)] for n in range(3)] == ["20000000", "20000000", "112000000"]
        governor.apply(Settings(clock_MHz=2500))  # a knob not named is restored
        assert settings_of(root)[CAP.format(0, 0)] == "28000000"
        governor.restore()
        assert settings_of(root) == before

    def test_a_clock_below_the_lowest_permitted_one_lowers_that_too(self, root: Path) -> None:
        before = settings_of(root)
        governor = governed(root)
        governor.apply(Settings(clock_MHz=1000))
        assert settings_of(root)[LOWEST.format(2)] == "1000000"
        governor.apply(Settings(clock_MHz=1100))
        assert settings_of(root)[LOWEST.format(2)] == "1100000"
        governor.apply(Settings(clock_MHz=3000))
        assert settings_of(root)[LOWEST.format(2)] == "1200000"
        governor.close()
        assert settings_of(root) == before

    def test_a_cap_that_was_switched_off_is_switched_on_and_off_again(self, root: Path) -> None:
        (root / "class/powercap/intel-rapl:0/enabled").write_text("0\n")
        before = settings_of(root)
        governor = governed(root)
        governor.apply(Settings(power_limit_W=16))
        assert settings_of(root)["class/powercap/intel-rapl:0/enabled"] == "1"
        governor.close()
        assert settings_of(root) == before

    def test_a_short_term_limit_below_the_cap_stays(self, root: Path) -> None:
        (root / CAP.format(0, 1)).write_text("15000000\n")
        governor = governed(root)
        governor.apply(Settings(power_limit_W=20))
        assert settings_of(root)[CAP.format(0, 1)] == "15000000"
        governor.close()

    def test_listed_clocks_are_the_ones_offered_and_others_snap_with_a_note(
        self, tmp_path: Path
    ) -> None:
        root = make_sysfs(tmp_path / "sys", listed_kHz=(1_200_000, 2_401_000, 1_800_000))
        governor = governed(root)
        assert governor.supported_clocks_MHz == (1200, 1800, 2401)
        applied = governor.apply(Settings(clock_MHz=1900))
        assert applied.settings == Settings(clock_MHz=1800)
        assert applied.notes == ("clock_MHz 1900 snapped to 1800",)
        governor.close()

    @pytest.mark.parametrize(
        ("live", "error", "says"),
        [
            ({"clock_MHz": 5000}, InvalidValue, "from 800 to 3600"),
            ({"clock_MHz": "fast"}, InvalidValue, "integer"),
            ({"clock_MHz": (1500, 2500)}, InvalidValue, "cores take one clock for all"),
            ({"clock_MHz": (1500,)}, InvalidValue, "cores take one clock for all"),
            ({"power_limit_W": 30}, InvalidValue, "from 14 to 28 for each package"),
            ({"power_limit_W": (4, 5)}, InvalidValue, "share one limit"),
            ({"memory_clock_MHz": 800}, InputError, "knob of GPUs"),
            ({"fan": 3}, UnknownName, "clock_MHz"),
        ],
    )
    def test_what_cannot_be_is_refused_before_anything_is_touched(
        self, root: Path, live: dict[str, object], error: type[Exception], says: str
    ) -> None:
        before = settings_of(root)
        governor = governed(root)
        with pytest.raises(error, match=says):
            governor.apply(Settings(live))
        assert settings_of(root) == before

    @pytest.mark.parametrize(
        ("live", "file", "theirs"),
        [
            ({"clock_MHz": 2000}, CLOCK.format(1), "1500000"),
            ({"clock_MHz": 2000}, CLOCK.format(1), "3000000"),
            ({"power_limit_W": 20}, CAP.format(0, 0), "16000000"),
            ({"power_limit_W": 20}, CAP.format(0, 1), "25000000"),
        ],
    )
    @pytest.mark.parametrize("ends", ["close", "guard"])
    def test_what_another_has_written_since_stays(
        self,
        root: Path,
        live: dict[str, int],
        file: str,
        theirs: str,
        ends: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        before = settings_of(root)
        governor = CpuGovernor(root, cpus=range(4), guarded=ends == "guard")
        governor.apply(Settings(live))
        (root / file).write_text(theirs)
        if ends == "guard":
            governor._guard.take_over()  # as when the agent is killed
        governor.close()
        assert settings_of(root) == {**before, file: theirs}
        if ends == "close":
            assert f"{root / file} says {theirs} and not the" in capsys.readouterr().err

    def test_what_another_has_written_bounds_what_may_be_set(self, root: Path) -> None:
        governor = governed(root)
        governor.apply(Settings(clock_MHz=2000))
        (root / CLOCK.format(2)).write_text("1500000")
        (sentence,) = governor.foreign()
        assert "says 1500000 and not the 2000000 of this search" in sentence
        assert governor.foreign() == ()
        with pytest.raises(SetByOthers, match="it stays"):
            governor.apply(Settings(clock_MHz=2000))
        governor.apply(Settings(clock_MHz=1000))
        governor.close()
        assert settings_of(root)[CLOCK.format(2)] == "1500000"
        assert settings_of(root)[CLOCK.format(1)] == "3400000"

    def test_a_clock_that_the_kernel_holds_down_is_nobodys(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Against heat, the kernel shows less than was written, whatever it was."""
        before, hot = settings_of(root), True
        governor = governed(root)
        governor.apply(Settings(clock_MHz=2000))
        read = Path.read_text

        def shown(path: Path, *args: object) -> str:
            text = read(path)
            hold = hot and path.name == "scaling_max_freq"
            return str(min(int(text), 1_200_000)) if hold else text

        monkeypatch.setattr(Path, "read_text", shown)
        assert governor.foreign() == ()
        hot = False
        assert settings_of(root)[CLOCK.format(0)] == "2000000"
        hot = True
        governor.close()
        hot = False
        assert settings_of(root) == before

    def test_the_cores_of_others_are_never_set(self, tmp_path: Path) -> None:
        root = make_sysfs(tmp_path / "sys", shared=2)
        governor = governed(root, range(3))
        assert not governor.can_set
        assert "share their clock with CPU 3" in governor.why_no_clock
        assert "package 0 is shared with CPU 3" in governor.why_no_limit
        alone = make_sysfs(tmp_path / "other", packages=2)
        with closing(governed(alone, range(2))) as governor:
            governor.apply(Settings(clock_MHz=2000, power_limit_W=18))
            now = settings_of(alone)
            assert (now[CLOCK.format(1)], now[CLOCK.format(2)]) == ("2000000", "3400000")
            assert (now[CAP.format(0, 0)], now[CAP.format(1, 0)]) == ("18000000", "28000000")

    def test_without_permission_it_says_what_an_administrator_can_run(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: Path, text: str) -> int:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(Path, "write_text", refuse)
        governor = governed(root)
        assert not governor.can_set
        files = f"{root}/devices/system/cpu/cpufreq/policy*/scaling_max_freq"
        assert f"chgrp GROUP {files}; chmod g+w {files}" in governor.why_not
        assert f"{root}/class/powercap/intel-rapl:*/constraint_0_power_limit_uw" in governor.why_not
        with pytest.raises(InputError, match="cannot set 2000MHz here"):
            governor.apply(Settings(clock_MHz=2000))
        assert governor.apply(Settings()).notes == ()

    def test_a_setting_that_does_not_read_back_is_an_error_and_is_undone(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = settings_of(root)
        governor = governed(root)
        write = Path.write_text

        def clamp(path: Path, text: str) -> int:
            held = path.parent.name == "policy3" and text == "2000000"
            return write(path, "2600000" if held else text)

        monkeypatch.setattr(Path, "write_text", clamp)
        with pytest.raises(GovernorError, match="says 2600000 after 2000000 was written"):
            governor.apply(Settings(clock_MHz=2000))
        assert settings_of(root) == before

    def test_the_fastest_core_of_the_job_is_what_was_delivered(self, root: Path) -> None:
        file = "devices/system/cpu/cpufreq/policy{}/scaling_cur_freq"
        (root / file.format(1)).write_text("2200000")
        (root / file.format(0)).write_text("2100000")
        governor = governed(root)
        governor.apply(Settings(), ranks=2)
        assert governor.delivered() == {FASTEST: 2200.0}


class TestOfAMachine:
    def test_cores_that_can_be_set_are_a_cluster_with_clocks_and_limits(
        self, tmp_path: Path
    ) -> None:
        cores = sorted(os.sched_getaffinity(0))
        root = make_sysfs(tmp_path / "sys", cores=max(cores) + 1, limit_W=7.0 * (max(cores) + 1))
        if len(cores) <= max(cores):
            pytest.skip("this process may not use all cores below its highest")
        before = settings_of(root)
        cluster = detect_cluster(environ={"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, sys=root)
        assert cluster.clock_control
        assert cluster.clocks_MHz[-1] == 3600
        assert cluster.device.default_clock_MHz == 3400
        assert cluster.device.max_W == 7.0
        assert cluster.device.max_limit_W == 7.0 * len(cores)
        assert cluster.device.min_limit_W == 3.5 * len(cores)
        assert cluster.device.devices_per_limit == len(cores)
        assert settings_of(root) == before

    def test_clocks_are_fixed_where_energy_is_estimated(self, tmp_path: Path) -> None:
        cores = max(os.sched_getaffinity(0)) + 1
        root = make_sysfs(tmp_path / "sys", cores=cores)
        cluster = Cluster("cpus", Device("core", "cpu", 2**30, 1e9, 1e9, 2.0, 8.0), cores)
        (root / "class/powercap/intel-rapl:0/name").write_text("psys\n")
        governor = Cores(sys=root).open_governor(cluster)
        assert isinstance(governor, FixedGovernor)
        assert "no RAPL" in governor.why_not or "share" in governor.why_not


@pytest.mark.parametrize("fault", FAULTS)
def test_no_death_of_an_agent_leaves_a_processor_wrong(fault: str, tmp_path: Path) -> None:
    assert try_cpu_fault(fault, 1, tmp_path) == ""


@pytest.mark.parametrize("fault", ["kill_group", "exception", "clean"])
def test_no_end_undoes_a_limit_that_another_has_set(fault: str, tmp_path: Path) -> None:
    assert try_cpu_fault(fault, 2, tmp_path, others_W=13) == ""

"""The governor on twin GPUs, and the guard by killing agents for real."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.twin import TwinGpu, TwinNode
from tests.waiting import is_running, wait_until
from tests.workload.node.clocks.governor_faults import FAULTS, try_fault
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName
from tuner.workload.node.clocks.base import (
    FixedGovernor,
    Governor,
    GovernorError,
    SetByOthers,
    UnsupportedKnob,
)
from tuner.workload.node.clocks.governor import TAKES_NONE, NvmlGovernor
from tuner.workload.node.clocks.own_guard import EarlierValues, Guard, put_back
from tuner.workload.node.meters.base import MeterError
from tuner.workload.node.platforms import platform_of
from tuner.workload.node.platforms.cores import Cores

pytestmark = pytest.mark.needs("cc")
Make = Callable[..., TwinNode]
NO_ENV: dict[str, str] = {}
A100 = Device("A100", "cuda", 2**36, 1e14, 1e12, 60.0, 400.0)
GPUS = Cluster("gpus", A100, 2, clock_control=True)
CPUS = Cluster("cpus", Device("core", "cpu", 2**30, 1e9, 1e9, 2.0, 8.0), 2)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.workload.node.clocks.guard.WAIT_S", 0.0)


@pytest.fixture
def busy(twin_node: Make) -> Make:
    """Return a function that makes a node of busy GPUs, of A100s by default."""

    def make(*gpus: TwinGpu, **options: Any) -> TwinNode:
        loaded = [replace(gpu, load=1.0) for gpu in gpus or (TwinGpu(),)]
        return twin_node(*loaded, call_s=1e-5, **options)

    return make


@pytest.fixture
def fake(busy: Make) -> TwinNode:
    return busy(TwinGpu(limit_W=350.0), TwinGpu(limit_W=375.0))


@pytest.fixture
def governor(fake: TwinNode) -> Iterator[NvmlGovernor]:
    made = NvmlGovernor(environ=NO_ENV, guarded=False)
    yield made
    made.close()


def locks(fake: TwinNode) -> list[tuple[int, int] | None]:
    return [fake.locked_MHz(gpu) for gpu in range(2)]


class TestNvmlGovernor:
    def test_is_a_governor_that_knows_its_clocks(self, governor: NvmlGovernor) -> None:
        assert isinstance(governor, Governor)
        assert governor.can_set
        assert governor.why_not == ""
        assert governor.supported_clocks_MHz == tuple(range(210, 1411, 15))

    def test_knows_the_limits_that_all_gpus_take(self, busy: Make) -> None:
        busy(TwinGpu(limit_W=350.0), TwinGpu(limit_W=375.0, min_limit_W=150.0))
        governor = NvmlGovernor(environ=NO_ENV, guarded=False)
        assert governor.limit_range_W == (150.0, 350.0)
        governor.close()

    def test_a_lock_that_no_gpu_takes_leaves_nothing_to_put_back(self, busy: Make) -> None:
        busy(TwinGpu(lockable=False))
        governor = NvmlGovernor(environ=NO_ENV, guarded=False)
        with pytest.raises(UnsupportedKnob, match=r"clock_MHz cannot be set.*no lock of its clock"):
            governor.apply(Settings(clock_MHz=1200))
        governor.apply(Settings(power_limit_W=300))
        governor.close()

    @pytest.mark.parametrize("number", [2, 3, 4, 13, 19, 27, 999])
    @pytest.mark.parametrize(
        ("knob", "setter"),
        [
            ("clock_MHz", "GpuLockedClocks"),
            ("memory_clock_MHz", "MemoryLockedClocks"),
            ("power_limit_W", "PowerManagementLimit"),
        ],
    )
    def test_a_setter_that_the_driver_refuses_costs_its_knob_alone(
        self, fake: TwinNode, governor: NvmlGovernor, number: int, knob: str, setter: str
    ) -> None:
        values = {"clock_MHz": 900, "memory_clock_MHz": 1593, "power_limit_W": 250}
        fake.fail(f"nvmlDeviceSet{setter}", number)
        for _ in range(2):
            with pytest.raises(UnsupportedKnob, match=f"^{knob} cannot be set: ") as caught:
                governor.apply(Settings(values))
            assert caught.value.knob == knob
            assert locks(fake) == [None, None]
            assert [fake.limit_W(0), fake.limit_W(1)] == [350.0, 375.0]
        if number != 3:
            assert "--no-clocks leaves" in str(caught.value)
        del values[knob]
        governor.apply(Settings(values))  # the others go on
        governor.restore()
        assert [fake.limit_W(0), fake.limit_W(1)] == [350.0, 375.0]

    def test_an_error_that_passes_costs_nothing(
        self, fake: TwinNode, governor: NvmlGovernor
    ) -> None:
        fake.fail("nvmlDeviceSetGpuLockedClocks", pynvml.NVML_ERROR_UNKNOWN, times=2)
        governor.apply(Settings(clock_MHz=900))
        assert locks(fake) == [(900, 900)] * 2

    def test_permission_that_is_withdrawn_is_the_knobs(
        self, fake: TwinNode, governor: NvmlGovernor
    ) -> None:
        governor.apply(Settings(clock_MHz=900))
        fake.fail("nvmlDeviceSetGpuLockedClocks", pynvml.NVML_ERROR_NO_PERMISSION)
        with pytest.raises(UnsupportedKnob, match="Insufficient Permissions"):
            governor.apply(Settings(clock_MHz=1200))
        assert locks(fake) == [None, None]

    @pytest.mark.parametrize("number", [15, 16])
    def test_a_gpu_that_fails_is_the_nodes(
        self, fake: TwinNode, governor: NvmlGovernor, number: int
    ) -> None:
        fake.fail("nvmlDeviceSetGpuLockedClocks", number)
        with pytest.raises(GovernorError, match="did not take"):
            governor.apply(Settings(clock_MHz=900))

    def test_a_gpu_that_answers_nothing_is_the_nodes(
        self, fake: TwinNode, governor: NvmlGovernor
    ) -> None:
        fake.fail("nvmlDeviceSetGpuLockedClocks", pynvml.NVML_ERROR_UNKNOWN)
        fake.fail("nvmlDeviceGetUUID", pynvml.NVML_ERROR_UNKNOWN)
        with pytest.raises(GovernorError, match="did not take"):
            governor.apply(Settings(clock_MHz=900))

    def test_sets_reads_back_and_puts_back_what_was_before(
        self, fake: TwinNode, governor: NvmlGovernor
    ) -> None:
        applied = governor.apply(Settings(clock_MHz=1200, power_limit_W=250))
        assert applied.settings == Settings(clock_MHz=1200, power_limit_W=250)
        assert locks(fake) == [(1200, 1200)] * 2
        assert [fake.limit_W(0), fake.limit_W(1)] == [250.0, 250.0]
        governor.restore()
        assert locks(fake) == [None, None]
        assert [fake.limit_W(0), fake.limit_W(1)] == [350.0, 375.0]  # before, not the default

    def test_a_supported_clock_is_taken_and_others_snapped_saying_so(
        self, fake: TwinNode, governor: NvmlGovernor
    ) -> None:
        assert not any("snapped" in note for note in governor.apply(Settings(clock_MHz=990)).notes)
        applied = governor.apply(Settings(clock_MHz=1000))
        assert applied.settings == Settings(clock_MHz=1005)
        assert "clock_MHz 1000 snapped to 1005" in applied.notes
        assert locks(fake) == [(1005, 1005)] * 2

    def test_one_clock_a_stage(self, fake: TwinNode, governor: NvmlGovernor) -> None:
        applied = governor.apply(Settings(clock_MHz=(900, 1300)))
        assert applied.settings == Settings(clock_MHz=(900, 1305))
        assert locks(fake) == [(900, 900), (1305, 1305)]

    def test_a_knob_not_named_goes_back(self, fake: TwinNode, governor: NvmlGovernor) -> None:
        governor.apply(Settings(clock_MHz=900, power_limit_W=200))
        governor.apply(Settings(power_limit_W=300))
        assert locks(fake) == [None, None]
        assert fake.limit_W(1) == 300.0
        governor.apply(Settings(clock_MHz=900))
        assert [fake.limit_W(0), fake.limit_W(1)] == [350.0, 375.0]
        assert governor.foreign() == ()  # what went back is nobody else's
        governor.apply(Settings())
        assert locks(fake) == [None, None]

    @pytest.mark.parametrize("gpu", [TwinGpu(tells_limit=False), TwinGpu(min_limit_W=400.0)])
    def test_a_card_that_tells_no_limit_or_a_fixed_one_has_none_to_choose(
        self, busy: Make, gpu: TwinGpu
    ) -> None:
        busy(gpu)
        governor = NvmlGovernor(environ=NO_ENV, guarded=False)
        assert governor.limit_range_W == (0.0, 0.0)
        governor.close()

    def test_a_driver_that_tells_no_capability_leaves_the_clocks(self, busy: Make) -> None:
        """Only GPUs that are known to be older than Volta cannot lock one."""
        node = busy(TwinGpu())
        node.fail("nvmlDeviceGetCudaComputeCapability", pynvml.NVML_ERROR_NOT_SUPPORTED)
        governor = NvmlGovernor(environ=NO_ENV, guarded=False)
        assert governor.supported_clocks_MHz
        governor.close()

    def test_a_lock_of_the_administrator_is_named_as_for_clocks_sh(self, fake: TwinNode) -> None:
        """NVML cannot be asked for a lock, so an administrator's was lost."""
        governor = NvmlGovernor(environ={"EARLIER_CLOCKS_MHZ": "600,1110"}, guarded=False)
        assert governor.apply(Settings(clock_MHz=1200)).notes == ()
        governor.close()
        assert locks(fake) == [(600, 1110)] * 2
        with pytest.raises(InvalidValue, match="MIN,MAX in MHz"):
            NvmlGovernor(environ={"EARLIER_CLOCKS_MHZ": "600"}, guarded=False)

    def test_one_that_cannot_be_made_leaves_nvml_closed(self, fake: TwinNode) -> None:
        with pytest.raises((InputError, MeterError)):
            NvmlGovernor(environ={"CUDA_VISIBLE_DEVICES": "7"}, guarded=False)
        with pytest.raises(pynvml.NVMLError):
            pynvml.nvmlDeviceGetCount()

    def test_an_unknown_earlier_lock_is_said_once(self, governor: NvmlGovernor) -> None:
        assert "released" in governor.apply(Settings(clock_MHz=1200)).notes[0]
        assert governor.apply(Settings(clock_MHz=1215)).notes == ()

    @pytest.mark.parametrize(
        ("live", "error", "says"),
        [
            ({"clock_MHz": 5000}, InvalidValue, "from 210 to 1410"),
            ({"clock_MHz": 100}, InvalidValue, "from 210 to 1410"),
            ({"clock_MHz": (900, 900, 900)}, InvalidValue, "divide the 2 GPUs"),
            ({"clock_MHz": "fast"}, InvalidValue, "integer"),
            ({"power_limit_W": 50}, InvalidValue, "from 100 to 400"),
            ({"power_limit_W": "low"}, InvalidValue, "watts"),
            ({"fan": 3}, UnknownName, "clock_MHz, power_limit_W"),
        ],
    )
    def test_what_cannot_be_is_refused_before_anything_is_touched(
        self,
        fake: TwinNode,
        governor: NvmlGovernor,
        live: dict[str, object],
        error: type[Exception],
        says: str,
    ) -> None:
        before = fake.log
        with pytest.raises(error, match=says):
            governor.apply(Settings(live))
        assert fake.log == before

    def test_without_permission_it_says_so_at_once(self, busy: Make) -> None:
        fake = busy(root=False)
        governor = NvmlGovernor(environ=NO_ENV, guarded=False)
        assert not governor.can_set
        assert "nvidia-smi -i 0 -lgc" in governor.why_not
        assert governor.why_not.index("zeusd") < governor.why_not.index("joulefront's guard")
        assert governor.supported_clocks_MHz == ()
        assert governor.apply(Settings()).settings == Settings()
        with pytest.raises(InputError, match="needs root"):
            governor.apply(Settings(clock_MHz=1200))
        assert governor.delivered()["clock_MHz"] == 1410
        governor.close()
        assert fake.log == []

    @pytest.mark.parametrize("root", [True, False])
    def test_a_card_without_limits_may_still_lock_its_clock(self, busy: Make, root: bool) -> None:
        fake = busy(TwinGpu(limit_settable=False), root=root)
        governor = NvmlGovernor(environ=NO_ENV, guarded=False)
        assert governor.can_set == root
        if root:
            governor.apply(Settings(clock_MHz=1200))
            assert fake.locked_MHz() == (1200, 1200)
            with pytest.raises(InputError, match="takes no limit"):
                governor.apply(Settings(power_limit_W=300))
        governor.close()

    def test_a_card_that_lists_nothing_to_set_says_so_by_its_name(self, busy: Make) -> None:
        busy(TwinGpu(lists_clocks=False, tells_limit=False))
        governor = NvmlGovernor(environ=NO_ENV, guarded=False)
        assert not governor.can_set
        assert governor.why_not == f"{governor.gpus[0].name} {TAKES_NONE}"
        governor.close()

    def test_delivered_is_what_runs_and_not_what_was_asked(self, busy: Make) -> None:
        busy(TwinGpu(ignores_lock=True))
        governor = NvmlGovernor(environ=NO_ENV, guarded=False)
        governor.apply(Settings(clock_MHz=900))
        assert governor.delivered()["clock_MHz"] == 1410
        governor.close()

    def test_delivered_tells_throttling(self, fake: TwinNode, governor: NvmlGovernor) -> None:
        governor.apply(Settings(power_limit_W=200))
        delivered = governor.delivered()
        assert delivered["clock_MHz"] < 1410
        assert (delivered["throttle_power"], delivered["throttle_thermal"]) == (1.0, 0.0)
        governor.apply(Settings())
        fake.set(heat_MHz=700, temperature_C=87)
        delivered = governor.delivered()
        assert (delivered["throttle_power"], delivered["throttle_thermal"]) == (0.0, 1.0)
        assert delivered["temperature_C"] == 87

    @pytest.mark.parametrize(
        "call", ["nvmlDeviceSetGpuLockedClocks", "nvmlDeviceSetPowerManagementLimit"]
    )
    def test_a_setter_that_fails_half_way_leaves_everything_as_it_was(
        self, fake: TwinNode, governor: NvmlGovernor, call: str
    ) -> None:
        fake.fail(call, pynvml.NVML_ERROR_UNKNOWN, first=2, times=1)
        with pytest.raises(GovernorError, match="did not take"):
            governor.apply(Settings(clock_MHz=900, power_limit_W=200))
        assert locks(fake) == [None, None]
        assert [fake.limit_W(0), fake.limit_W(1)] == [350.0, 375.0]

    def test_putting_back_is_tried_again_and_a_failure_is_said(
        self, fake: TwinNode, governor: NvmlGovernor
    ) -> None:
        governor.apply(Settings(clock_MHz=900))
        fake.fail("nvmlDeviceResetGpuLockedClocks", pynvml.NVML_ERROR_UNKNOWN, times=2)
        governor.restore()
        assert locks(fake) == [None, None]
        governor.apply(Settings(clock_MHz=900))
        fake.set(1, lost=1)
        with pytest.raises(
            GovernorError, match=r"of GPU-00000001-.* was not put back: GPU is lost"
        ):
            governor.restore()
        assert fake.locked_MHz(0) is None  # what could be put back was
        fake.set(1, lost=0)

    def test_closing_restores_and_may_be_done_twice(self, fake: TwinNode) -> None:
        governor = NvmlGovernor(environ=NO_ENV, guarded=False)
        governor.apply(Settings(clock_MHz=900))
        governor.close()
        governor.close()
        assert locks(fake) == [None, None]

    def test_only_visible_gpus_are_touched(self, fake: TwinNode) -> None:
        governor = NvmlGovernor(environ={"CUDA_VISIBLE_DEVICES": "1"}, guarded=False)
        governor.apply(Settings(clock_MHz=900))
        assert locks(fake) == [None, (900, 900)]
        governor.close()
        assert {gpu for _, gpu, _ in fake.log} == {1}


def another_sets(gpu: int, limit_W: float) -> None:
    """Set a power limit as a site's administrator or a scheduler's plugin does."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
    pynvml.nvmlDeviceSetPowerManagementLimit(handle, round(1000 * limit_W))
    pynvml.nvmlShutdown()


class TestLimitsOfOthers:
    """What another process has set since stays: closing lifted the cap of a site."""

    @pytest.mark.parametrize("limit_W", [250.0, 320.0])
    @pytest.mark.parametrize("end", ["restore", "close", "next", "none"])
    def test_it_is_not_put_back(
        self,
        fake: TwinNode,
        governor: NvmlGovernor,
        capsys: pytest.CaptureFixture[str],
        limit_W: float,
        end: str,
    ) -> None:
        governor.apply(Settings(power_limit_W=300))
        another_sets(0, limit_W)
        if end == "restore":
            governor.restore()
        elif end == "next":
            governor.apply(Settings(clock_MHz=900))
        elif end == "none":
            governor.apply(Settings())
        governor.close()
        assert [fake.limit_W(0), fake.limit_W(1)] == [limit_W, 375.0]
        sentence = f"the power limit of GPU 0 is {limit_W:g} W and not the 300 W of this search"
        assert capsys.readouterr().err.count(sentence) == 1

    def test_it_is_told_once_and_bounds_what_may_be_set(
        self, fake: TwinNode, governor: NvmlGovernor
    ) -> None:
        governor.apply(Settings(clock_MHz=900))
        assert governor.foreign() == ()
        another_sets(1, 250.0)
        (sentence,) = governor.foreign()
        assert sentence.startswith("the power limit of GPU 1 is 250 W and not the 375 W")
        assert governor.foreign() == ()
        assert governor.limit_range_W == (100.0, 250.0)
        with pytest.raises(SetByOthers, match="300 W is above the 250 W"):
            governor.apply(Settings(power_limit_W=300))
        assert fake.limit_W(1) == 250.0
        governor.apply(Settings(power_limit_W=200))
        governor.close()
        assert [fake.limit_W(0), fake.limit_W(1)] == [350.0, 250.0]

    def test_it_is_seen_where_clocks_are_left_alone(self, fake: TwinNode) -> None:
        governor = NvmlGovernor(environ=NO_ENV, leave_alone=True)
        assert governor.limit_range_W == (0.0, 0.0)
        another_sets(0, 250.0)
        assert len(governor.foreign()) == 1
        assert governor.limit_range_W == (0.0, 0.0)
        governor.close()
        assert fake.limit_W(0) == 250.0

    def test_the_last_value_of_others_counts(self, fake: TwinNode, governor: NvmlGovernor) -> None:
        governor.apply(Settings(power_limit_W=300))
        another_sets(0, 200.0)
        governor.apply(Settings(power_limit_W=150))
        another_sets(0, 340.0)
        governor.close()
        assert [fake.limit_W(0), fake.limit_W(1)] == [340.0, 375.0]

    def test_an_own_limit_of_earlier_that_others_set_stays(
        self, fake: TwinNode, governor: NvmlGovernor
    ) -> None:
        governor.apply(Settings(power_limit_W=300))
        governor.apply(Settings(power_limit_W=200))
        another_sets(0, 300.0)
        governor.close()
        assert [fake.limit_W(0), fake.limit_W(1)] == [300.0, 375.0]

    def test_a_limit_that_cannot_be_read_is_put_back(
        self, fake: TwinNode, governor: NvmlGovernor
    ) -> None:
        governor.apply(Settings(power_limit_W=300))
        fake.fail("nvmlDeviceGetPowerManagementLimit", pynvml.NVML_ERROR_UNKNOWN, times=50)
        governor.close()
        assert [fake.limit_W(0), fake.limit_W(1)] == [350.0, 375.0]

    def test_the_guard_of_an_agent_that_is_gone_leaves_it(self, busy: Make) -> None:
        node = busy(TwinGpu(limit_W=350.0), TwinGpu(limit_W=375.0), children=True)
        governor = NvmlGovernor(environ=NO_ENV)
        governor.apply(Settings(power_limit_W=300, clock_MHz=900))
        governor.apply(Settings(power_limit_W=280, clock_MHz=900))
        another_sets(0, 250.0)
        governor._guard.take_over()  # as when the agent is killed
        assert [node.limit_W(0), node.limit_W(1)] == [250.0, 375.0]
        assert locks(node) == [None, None]
        governor.close()
        assert [node.limit_W(0), node.limit_W(1)] == [250.0, 375.0]

    @pytest.mark.parametrize(("now_mW", "left_mW"), [(280_000, 350_000), (300_000, 350_000)])
    def test_a_change_under_way_is_the_searchs_own(
        self, fake: TwinNode, now_mW: int, left_mW: int
    ) -> None:
        """An agent may die between the note to its guard and the setter."""
        another_sets(0, now_mW / 1000)
        uuid, what = "GPU-00000000-aaaa-bbbb-cccc-0123456789ab", "PowerManagementLimit"
        old = EarlierValues(uuid, what, (350_000,), (300_000, 280_000))
        pynvml.nvmlInit()
        assert put_back(pynvml, [old]) == []
        pynvml.nvmlShutdown()
        assert fake.limit_W(0) == left_mW / 1000


class TestMemoryClock:
    @pytest.fixture
    def fake(self, busy: Make) -> TwinNode:
        return busy(*[TwinGpu(memory_MHz=(405, 810, 1593))] * 2)

    def test_is_set_snapped_delivered_and_released(
        self, fake: TwinNode, governor: NvmlGovernor
    ) -> None:
        applied = governor.apply(Settings(memory_clock_MHz=800, clock_MHz=1200))
        assert applied.settings == Settings(memory_clock_MHz=810, clock_MHz=1200)
        assert "memory_clock_MHz 800 snapped to 810" in applied.notes
        assert fake.memory_locked_MHz(1) == (810, 810)
        assert governor.delivered()["memory_clock_MHz"] == 810
        governor.apply(Settings(clock_MHz=1200))  # not named: it goes back
        assert fake.memory_locked_MHz(0) is None
        governor.apply(Settings(memory_clock_MHz=405))
        governor.close()
        assert [fake.memory_locked_MHz(gpu) for gpu in range(2)] == [None, None]

    def test_outside_the_list_is_refused(self, governor: NvmlGovernor) -> None:
        with pytest.raises(InputError, match="from 405 to 1593"):
            governor.apply(Settings(memory_clock_MHz=2000))


class TestStages:
    @pytest.fixture
    def fake(self, busy: Make) -> TwinNode:
        return busy(*[TwinGpu()] * 4)

    @pytest.mark.parametrize("limits_W", [(200, 300), (100, 400), (128.7, 256)])
    def test_power_limits_may_be_by_stage_too(
        self, fake: TwinNode, governor: NvmlGovernor, limits_W: tuple[float, float]
    ) -> None:
        governor.apply(Settings(power_limit_W=limits_W))
        first_W, last_W = limits_W
        assert [fake.limit_W(gpu) for gpu in range(4)] == [first_W, first_W, last_W, last_W]

    def test_gpus_that_no_rank_uses_are_left_alone(
        self, fake: TwinNode, governor: NvmlGovernor
    ) -> None:
        """A job's script locks its own GPUs only, and a lock raises the idle power."""
        applied = governor.apply(Settings(clock_MHz=(900, 1200)), ranks=2)
        assert applied.settings == Settings(clock_MHz=(900, 1200))
        assert [fake.locked_MHz(gpu) for gpu in range(4)] == [(900, 900), (1200, 1200), None, None]
        governor.apply(Settings(clock_MHz=600, power_limit_W=300))
        assert [fake.locked_MHz(gpu) for gpu in range(4)] == [(600, 600)] * 4
        governor.apply(Settings(clock_MHz=1200), ranks=1)
        assert [fake.locked_MHz(gpu) for gpu in range(4)] == [(1200, 1200), None, None, None]
        assert fake.limit_W(3) == 400.0


class TestWithoutLocks:
    @pytest.mark.parametrize("capabilities", [((6, 1),), ((7, 0),), ((8, 0), (6, 1))])
    def test_cards_older_than_the_lock_have_no_clock_to_choose(
        self, busy: Make, capabilities: tuple[tuple[int, int], ...]
    ) -> None:
        fake = busy(*[TwinGpu(compute=each, lockable=each >= (7, 0)) for each in capabilities])
        governor = NvmlGovernor(environ=NO_ENV, guarded=False)
        assert bool(governor.supported_clocks_MHz) == ((6, 1) not in capabilities)
        governor.apply(Settings(power_limit_W=200))
        assert fake.limit_W() == 200.0
        governor.close()
        assert fake.limit_W() == 400.0

    def test_what_a_driver_says_is_not_supported_is_not_tried_again(
        self, fake: TwinNode, governor: NvmlGovernor
    ) -> None:
        fake.fail("nvmlDeviceSetGpuLockedClocks", pynvml.NVML_ERROR_NOT_SUPPORTED, times=1)
        with pytest.raises(UnsupportedKnob):
            governor.apply(Settings(clock_MHz=900))

    def test_a_refusal_that_took_effect_all_the_same_is_put_back(
        self, fake: TwinNode, governor: NvmlGovernor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        really = pynvml.nvmlDeviceSetGpuLockedClocks

        def sets_and_refuses(*words: Any) -> None:
            really(*words)
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

        monkeypatch.setattr(pynvml, "nvmlDeviceSetGpuLockedClocks", sets_and_refuses)
        with pytest.raises(UnsupportedKnob):
            governor.apply(Settings(clock_MHz=900))
        assert locks(fake) == [None, None]


class TestOpenGovernor:
    def test_what_is_missing_is_said_before_anything_runs(self, busy: Make) -> None:
        fake = busy(root=False)
        said = platform_of(GPUS).why_fixed(GPUS)
        assert "needs root" in said
        assert "nvidia-smi -i 0 -lgc MIN,MAX" in said
        assert fake.log == []
        fake.permit(True)
        assert platform_of(GPUS).why_fixed(GPUS) == ""

    def test_cores_of_a_virtual_machine_have_a_fixed_clock(self, tmp_path: Path) -> None:
        governor = Cores(sys=tmp_path).open_governor(CPUS)
        assert isinstance(governor, Governor)
        assert "no cpufreq" in governor.why_not
        assert not governor.can_set
        assert governor.apply(Settings()).notes == ()
        assert governor.delivered() == {}
        governor.restore()
        governor.close()
        with pytest.raises(InputError, match="cannot set 900MHz here"):
            governor.apply(Settings(clock_MHz=900))

    def test_a_fixed_governor_refuses_and_says_why(self) -> None:
        governor = FixedGovernor("no reason")
        assert isinstance(governor, Governor)
        assert governor.delivered() == {}
        with pytest.raises(InputError, match="cannot set 900MHz here: no reason"):
            governor.apply(Settings(clock_MHz=900))

    @pytest.mark.parametrize("missing", ["package", "library"])
    def test_without_nvml_the_clock_is_fixed_and_says_why(
        self, fake: TwinNode, missing: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if missing == "package":
            monkeypatch.setitem(sys.modules, "pynvml", None)
        else:
            fake.fail("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        governor = platform_of(GPUS).open_governor(GPUS)
        assert not governor.can_set
        assert "NVML" in governor.why_not


# ---- the guard, by real deaths


class TestGuard:
    @pytest.mark.parametrize("fault", FAULTS)
    def test_no_clock_is_left_wrong(self, tmp_path: Path, fault: str) -> None:
        assert try_fault(fault, 1, tmp_path) == ""

    @pytest.mark.parametrize("fault", ["kill_group", "exception", "clean"])
    def test_no_end_undoes_a_limit_that_another_has_set(self, tmp_path: Path, fault: str) -> None:
        assert try_fault(fault, 2, tmp_path, others_W=137) == ""

    @pytest.fixture
    def fake(self, busy: Make) -> TwinNode:
        return busy(TwinGpu(), TwinGpu(), children=True)

    @pytest.fixture
    def governor(self, fake: TwinNode) -> NvmlGovernor:
        """A governor that has set a clock, and whose guard is on the node, too."""
        governor = NvmlGovernor(environ=NO_ENV)
        governor.apply(Settings(clock_MHz=900))
        return governor

    def test_after_a_clean_end_the_guard_touches_nothing(
        self, fake: TwinNode, governor: NvmlGovernor
    ) -> None:
        assert governor._guard is not None
        guard = governor._guard.pid
        governor.close()
        wait_until(lambda: not is_running(guard))
        put_back_calls = [name for name, _, _ in fake.log if "Reset" in name]
        assert put_back_calls == ["nvmlDeviceResetGpuLockedClocks"] * 2  # the agent's, of two GPUs

    def test_a_guard_that_was_killed_is_replaced(self, governor: NvmlGovernor) -> None:
        assert governor._guard is not None
        first = governor._guard.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not is_running(first))
        governor.apply(Settings(clock_MHz=1200))
        assert governor._guard.pid != first
        second = governor._guard.pid
        governor.close()
        wait_until(lambda: not is_running(second))

    def test_a_guard_that_dies_this_instant_is_noticed(
        self, fake: TwinNode, governor: NvmlGovernor
    ) -> None:
        """A pipe takes a message for a reader that is dead already; nothing may be set on that."""
        assert governor._guard is not None
        first = governor._guard.pid
        os.kill(first, signal.SIGSTOP)  # it cannot read what it is told ...
        killer = threading.Timer(0.3, os.kill, (first, signal.SIGKILL))  # ... and never will
        killer.start()
        governor.apply(Settings(clock_MHz=1200))
        killer.join()
        assert governor._guard.pid != first
        governor.close()
        assert locks(fake) == [None, None]

    def test_without_a_guard_nothing_is_touched(self, fake: TwinNode) -> None:
        governor = NvmlGovernor(environ=NO_ENV)
        governor._guard = Guard("no_such_module")
        before = fake.log
        with pytest.raises(GovernorError, match="ModuleNotFoundError"):
            governor.apply(Settings(clock_MHz=900))
        assert fake.log == before
        governor.close()

    def test_put_back_does_all_it_can(self, busy: Make) -> None:
        fake = busy(TwinGpu(uuid="GPU-a"), TwinGpu(uuid="GPU-b"))
        pynvml.nvmlInit()
        problems = put_back(
            pynvml,
            [
                EarlierValues("GPU-gone", "GpuLockedClocks"),
                EarlierValues("GPU-a", "GpuLockedClocks", (300, 600)),
                EarlierValues("GPU-b", "PowerManagementLimit", (123_000,)),
            ],
        )
        assert len(problems) == 1
        assert "GPU-gone" in problems[0]
        assert fake.log == [
            ("nvmlDeviceSetGpuLockedClocks", 0, (300, 600)),
            ("nvmlDeviceSetPowerManagementLimit", 1, (123_000, 0)),
        ]

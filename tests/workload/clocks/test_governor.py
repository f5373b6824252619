"""The governor on the fake GPUs, the guard by killing agents for real, and the fake itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName
from tuner.testing.fake_nvml import STATE_FILE, FakeClock, FakeGpu, FakeNVML
from tuner.workload.clocks.base import FixedGovernor, Governor, GovernorError
from tuner.workload.clocks.governor import NvmlGovernor, open_governor, why_fixed
from tuner.workload.clocks.guard import Earlier, Guard, GuardError, put_back

NO_ENV: dict[str, str] = {}
GPUS = Cluster("gpus", Device("A100", "cuda", 2**36, 1e14, 1e12, 60.0, 400.0), 2)
CPUS = Cluster("cpus", Device("core", "cpu", 2**30, 1e9, 1e9, 2.0, 8.0), 2)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.workload.clocks.guard.WAIT_S", 0.0)


@pytest.fixture
def fake() -> FakeNVML:
    return FakeNVML([FakeGpu(limit_W=350.0), FakeGpu(limit_W=375.0)])


@pytest.fixture
def governor(fake: FakeNVML) -> Iterator[NvmlGovernor]:
    made = NvmlGovernor(nvml=fake, environ=NO_ENV)
    yield made
    made.close()


def locks(fake: FakeNVML) -> list[tuple[int, int] | None]:
    return [fake.locked_MHz(gpu) for gpu in range(2)]


class TestNvmlGovernor:
    def test_is_a_governor_that_knows_its_clocks(self, governor: NvmlGovernor) -> None:
        assert isinstance(governor, Governor)
        assert governor.can_set
        assert governor.why_not == ""
        assert governor.supported_clocks_MHz == tuple(range(210, 1411, 15))

    def test_sets_reads_back_and_puts_back_what_was_before(
        self, fake: FakeNVML, governor: NvmlGovernor
    ) -> None:
        applied = governor.apply(Settings(clock_MHz=1200, power_limit_W=250))
        assert applied.settings == Settings(clock_MHz=1200, power_limit_W=250)
        assert locks(fake) == [(1200, 1200)] * 2
        assert [fake.limit_W(0), fake.limit_W(1)] == [250.0, 250.0]
        governor.restore()
        assert locks(fake) == [None, None]
        assert [fake.limit_W(0), fake.limit_W(1)] == [350.0, 375.0]  # before, not the default

    def test_a_supported_clock_is_taken_and_others_snapped_saying_so(
        self, fake: FakeNVML, governor: NvmlGovernor
    ) -> None:
        assert not any("snapped" in note for note in governor.apply(Settings(clock_MHz=990)).notes)
        applied = governor.apply(Settings(clock_MHz=1000))
        assert applied.settings == Settings(clock_MHz=1005)
        assert "clock_MHz 1000 snapped to 1005" in applied.notes
        assert locks(fake) == [(1005, 1005)] * 2

    def test_one_clock_a_stage(self, fake: FakeNVML, governor: NvmlGovernor) -> None:
        applied = governor.apply(Settings(clock_MHz=(900, 1300)))
        assert applied.settings == Settings(clock_MHz=(900, 1305))
        assert locks(fake) == [(900, 900), (1305, 1305)]

    def test_a_knob_not_named_goes_back(self, fake: FakeNVML, governor: NvmlGovernor) -> None:
        governor.apply(Settings(clock_MHz=900, power_limit_W=200))
        governor.apply(Settings(power_limit_W=300))
        assert locks(fake) == [None, None]
        assert fake.limit_W(1) == 300.0
        governor.apply(Settings())
        assert [fake.limit_W(0), fake.limit_W(1)] == [350.0, 375.0]

    def test_a_lock_of_the_administrator_is_put_back_where_it_is_known(
        self, fake: FakeNVML
    ) -> None:
        governor = NvmlGovernor(nvml=fake, environ=NO_ENV, earlier_clocks_MHz=(600, 1110))
        assert governor.apply(Settings(clock_MHz=1200)).notes == ()
        governor.close()
        assert locks(fake) == [(600, 1110)] * 2

    def test_finding_20_a_lock_of_the_administrator_is_named_as_for_clocks_sh(
        self, fake: FakeNVML
    ) -> None:
        """finding_20: NVML cannot be asked for a lock, so an administrator's was lost."""
        governor = NvmlGovernor(nvml=fake, environ={"EARLIER_CLOCKS_MHZ": "600,1110"})
        assert governor.apply(Settings(clock_MHz=1200)).notes == ()
        governor.close()
        assert locks(fake) == [(600, 1110)] * 2
        with pytest.raises(InvalidValue, match="MIN,MAX in MHz"):
            NvmlGovernor(nvml=fake, environ={"EARLIER_CLOCKS_MHZ": "600"})

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
        fake: FakeNVML,
        governor: NvmlGovernor,
        live: dict[str, object],
        error: type[Exception],
        says: str,
    ) -> None:
        before = fake.log
        with pytest.raises(error, match=says):
            governor.apply(Settings(live))
        assert fake.log == before

    def test_without_permission_it_says_so_at_once(self) -> None:
        fake = FakeNVML(root=False)
        governor = NvmlGovernor(nvml=fake, environ=NO_ENV)
        assert not governor.can_set
        assert "nvidia-smi -i 0 -lgc" in governor.why_not
        assert governor.why_not.index("zeusd") < governor.why_not.index("as root")
        assert governor.supported_clocks_MHz == ()
        assert governor.apply(Settings()).settings == Settings()
        with pytest.raises(InputError, match="needs root"):
            governor.apply(Settings(clock_MHz=1200))
        assert governor.delivered()["clock_MHz"] == 1410
        governor.close()
        assert fake.log == []

    def test_the_trial_changes_nothing(self, fake: FakeNVML, governor: NvmlGovernor) -> None:
        assert governor.can_set
        assert [fake.limit_W(0), fake.limit_W(1)] == [350.0, 375.0]
        assert locks(fake) == [None, None]

    @pytest.mark.parametrize("root", [True, False])
    def test_a_card_without_limits_may_still_lock_its_clock(self, root: bool) -> None:
        fake = FakeNVML([FakeGpu(limit_settable=False)], root=root)
        governor = NvmlGovernor(nvml=fake, environ=NO_ENV)
        assert governor.can_set == root
        if root:
            governor.apply(Settings(clock_MHz=1200))
            assert fake.locked_MHz() == (1200, 1200)
            with pytest.raises(InputError, match="takes no limit"):
                governor.apply(Settings(power_limit_W=300))
        governor.close()

    def test_delivered_is_what_runs_and_not_what_was_asked(self) -> None:
        fake = FakeNVML([FakeGpu(ignores_lock=True)])
        governor = NvmlGovernor(nvml=fake, environ=NO_ENV)
        governor.apply(Settings(clock_MHz=900))
        assert governor.delivered()["clock_MHz"] == 1410
        governor.close()

    def test_delivered_tells_throttling(self, fake: FakeNVML, governor: NvmlGovernor) -> None:
        governor.apply(Settings(power_limit_W=200))
        delivered = governor.delivered()
        assert delivered["clock_MHz"] < 1410
        assert (delivered["throttle_power"], delivered["throttle_thermal"]) == (1.0, 0.0)
        governor.apply(Settings())
        for gpu in range(2):
            fake.event("heat", 700, gpu=gpu)
        delivered = governor.delivered()
        assert (delivered["throttle_power"], delivered["throttle_thermal"]) == (0.0, 1.0)
        assert delivered["temperature_C"] == 87

    @pytest.mark.parametrize(
        "call", ["nvmlDeviceSetGpuLockedClocks", "nvmlDeviceSetPowerManagementLimit"]
    )
    def test_a_setter_that_fails_half_way_leaves_everything_as_it_was(
        self, fake: FakeNVML, governor: NvmlGovernor, call: str
    ) -> None:
        fake.fail(call, pynvml.NVML_ERROR_UNKNOWN, first=2, times=1)
        with pytest.raises(GovernorError, match="did not take"):
            governor.apply(Settings(clock_MHz=900, power_limit_W=200))
        assert locks(fake) == [None, None]
        assert [fake.limit_W(0), fake.limit_W(1)] == [350.0, 375.0]

    def test_putting_back_is_tried_again_and_a_failure_is_said(
        self, fake: FakeNVML, governor: NvmlGovernor
    ) -> None:
        governor.apply(Settings(clock_MHz=900))
        fake.fail("nvmlDeviceResetGpuLockedClocks", pynvml.NVML_ERROR_UNKNOWN, times=2)
        governor.restore()
        assert locks(fake) == [None, None]
        governor.apply(Settings(clock_MHz=900))
        fake.event("lost", gpu=1)
        with pytest.raises(
            GovernorError, match=r"of GPU-00000001-.* was not put back: GPU is lost"
        ):
            governor.restore()
        assert fake.locked_MHz(0) is None  # what could be put back was
        fake.event("lost", False, gpu=1)

    def test_closing_restores_and_may_be_done_twice(self, fake: FakeNVML) -> None:
        governor = NvmlGovernor(nvml=fake, environ=NO_ENV)
        governor.apply(Settings(clock_MHz=900))
        governor.close()
        governor.close()
        assert locks(fake) == [None, None]

    def test_only_visible_gpus_are_touched(self, fake: FakeNVML) -> None:
        governor = NvmlGovernor(nvml=fake, environ={"CUDA_VISIBLE_DEVICES": "1"})
        governor.apply(Settings(clock_MHz=900))
        assert locks(fake) == [None, (900, 900)]
        governor.close()
        assert {gpu for _, gpu, _ in fake.log} == {1}


class TestMemoryClock:
    @pytest.fixture
    def fake(self) -> FakeNVML:
        return FakeNVML([FakeGpu(slow_memory_MHz=(405, 810)), FakeGpu(slow_memory_MHz=(405, 810))])

    def test_is_set_snapped_delivered_and_released(
        self, fake: FakeNVML, governor: NvmlGovernor
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
    def fake(self) -> FakeNVML:
        return FakeNVML([FakeGpu()] * 4)

    def test_power_limits_may_be_by_stage_too(self, fake: FakeNVML, governor: NvmlGovernor) -> None:
        governor.apply(Settings(power_limit_W=(200, 300)))
        assert [fake.limit_W(gpu) for gpu in range(4)] == [200.0, 200.0, 300.0, 300.0]

    def test_finding_20_gpus_that_no_rank_uses_are_left_alone(
        self, fake: FakeNVML, governor: NvmlGovernor
    ) -> None:
        """finding_20: clocks.sh locks the job's GPUs only, and a lock raises the idle power."""
        applied = governor.apply(Settings(clock_MHz=(900, 1200)), ranks=2)
        assert applied.settings == Settings(clock_MHz=(900, 1200))
        assert [fake.locked_MHz(gpu) for gpu in range(4)] == [(900, 900), (1200, 1200), None, None]
        governor.apply(Settings(clock_MHz=600, power_limit_W=300))
        assert [fake.locked_MHz(gpu) for gpu in range(4)] == [(600, 600)] * 4
        governor.apply(Settings(clock_MHz=1200), ranks=1)
        assert [fake.locked_MHz(gpu) for gpu in range(4)] == [(1200, 1200), None, None, None]
        assert fake.limit_W(3) == 400.0


class TestApplicationClocks:
    def test_are_used_where_anybody_may_set_them(self) -> None:
        fake = FakeNVML([FakeGpu(application_free=True)], root=False)
        fake.event("application", [1593, 1200])
        governor = NvmlGovernor(nvml=fake, environ=NO_ENV)
        assert (governor.can_set, governor.means) == (True, "application clocks")
        assert governor.apply(Settings(clock_MHz=900)).notes == ()
        assert fake.application_MHz() == (1593, 900)
        assert governor.delivered()["clock_MHz"] == 900
        with pytest.raises(InputError, match="takes no limit"):
            governor.apply(Settings(power_limit_W=200))
        governor.close()
        assert fake.application_MHz() == (1593, 1200)  # what stood before, not the default

    def test_are_used_on_cards_older_than_the_lock(self) -> None:
        fake = FakeNVML([FakeGpu(compute=(6, 0), lockable=False)])
        governor = NvmlGovernor(nvml=fake, environ=NO_ENV)
        governor.apply(Settings(clock_MHz=900, power_limit_W=200))
        assert (fake.application_MHz(), fake.limit_W()) == ((1593, 900), 200.0)
        governor.close()
        assert (fake.application_MHz(), fake.limit_W()) == ((1593, 1410), 400.0)

    def test_are_not_where_they_are_restricted(self) -> None:
        governor = NvmlGovernor(nvml=FakeNVML(root=False), environ=NO_ENV)
        assert not governor.can_set
        for what in ("root", "-lgc MIN,MAX", "-acp 0", "zeusd"):
            assert what in governor.why_not
        governor.close()


class TestOpenGovernor:
    def test_gpus(self, fake: FakeNVML) -> None:
        governor = open_governor(GPUS, nvml=fake)
        assert governor.can_set
        governor.close()

    def test_what_is_missing_is_said_before_anything_runs(self) -> None:
        fake = FakeNVML(root=False)
        said = why_fixed(GPUS, nvml=fake)
        assert "needs root" in said
        assert "nvidia-smi -i 0 -lgc MIN,MAX" in said
        assert fake.log == []
        assert why_fixed(GPUS, nvml=FakeNVML()) == ""

    def test_cores_of_a_virtual_machine_have_a_fixed_clock(self, tmp_path: Path) -> None:
        governor = open_governor(CPUS, nvml=FakeNVML(), sys=tmp_path)
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
        self, missing: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nvml = None
        if missing == "package":
            monkeypatch.setitem(sys.modules, "pynvml", None)
        else:
            nvml = FakeNVML()
            nvml.fail("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        governor = open_governor(GPUS, nvml=nvml)
        assert not governor.can_set
        assert "NVML" in governor.why_not


# ---- the guard, by real deaths

AGENT = """
import os, sys, time
from tuner.testing.fake_nvml import from_environment
from tuner.search_spaces.configuration import Settings
from tuner.workload.clocks.governor import NvmlGovernor
guard_nvml = "tuner.testing.fake_nvml:from_environment"
governor = NvmlGovernor(nvml=from_environment(), guard_nvml=guard_nvml)
governor.apply(Settings(clock_MHz=900))
governor.apply(Settings(clock_MHz=1200, power_limit_W=200))
pids = [governor._guard.pid]
if sys.argv[1] == "leaky":
    child = os.fork()  # it inherits the agent's end of the pipe
    if child == 0:
        time.sleep(600)
    pids.append(child)
print(*pids, flush=True)  # one process prints, in one line: two could mix theirs
if sys.argv[1] == "close":
    governor.close()
elif sys.argv[1] == "raise":
    raise RuntimeError("the agent fell over")
elif sys.argv[1] == "leave":
    os._exit(3)
else:
    time.sleep(600)
"""


def wait_until(true: Callable[[], bool], limit_s: float = 60.0) -> None:
    end_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return text.rpartition(")")[2].split()[0] == "Z"


class Agents:
    """Starts small agents on a file-backed fake and ends what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "gpus.json"
        self.fake = FakeNVML([FakeGpu(limit_W=350.0)], state_file=self.state)
        root = Path(__file__).parents[3]
        self.environ = os.environ | {
            STATE_FILE: str(self.state),
            "PYTHONPATH": str(root),
        }
        self.environ.pop("CUDA_VISIBLE_DEVICES", None)
        self.running: list[subprocess.Popen[str]] = []

    def start(self, ending: str) -> tuple[subprocess.Popen[str], list[int]]:
        agent = subprocess.Popen(
            [sys.executable, "-c", AGENT, ending],
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.running.append(agent)
        assert agent.stdout is not None
        return agent, [int(word) for word in agent.stdout.readline().split()]

    def settings(self) -> tuple[tuple[int, int] | None, float]:
        return self.fake.locked_MHz(), self.fake.limit_W()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    made = Agents(tmp_path)
    yield made
    for agent in made.running:
        agent.kill()
        agent.wait()
        assert agent.stdout is not None
        agent.stdout.close()


BEFORE, DURING = (None, 350.0), ((1200, 1200), 200.0)


class TestGuard:
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_a_killed_agent_leaves_no_clock_wrong(
        self, agents: Agents, number: signal.Signals
    ) -> None:
        agent, (guard,) = agents.start("wait")
        assert agents.settings() == DURING
        os.killpg(agent.pid, number)  # the whole group, as a terminal or a scheduler does
        agent.wait()
        wait_until(lambda: agents.settings() == BEFORE)
        wait_until(lambda: is_gone(guard))

    @pytest.mark.parametrize("ending", ["raise", "leave"])
    def test_an_agent_that_falls_over(self, agents: Agents, ending: str) -> None:
        agent, (guard,) = agents.start(ending)
        assert agent.wait() != 0
        wait_until(lambda: agents.settings() == BEFORE)
        wait_until(lambda: is_gone(guard))

    def test_a_child_that_holds_the_pipe_open_does_not_hide_the_death(self, agents: Agents) -> None:
        agent, (guard, child) = agents.start("leaky")
        try:
            agent.kill()  # the agent alone: its child lives on, with the pipe
            agent.wait()
            wait_until(lambda: agents.settings() == BEFORE)
            wait_until(lambda: is_gone(guard))
            assert not is_gone(child)
        finally:
            if not is_gone(child):
                os.kill(child, signal.SIGKILL)

    def test_after_a_clean_end_the_guard_touches_nothing(self, agents: Agents) -> None:
        agent, (guard,) = agents.start("close")
        assert agent.wait() == 0
        wait_until(lambda: is_gone(guard))
        assert agents.settings() == BEFORE
        put_back_calls = [name for name, _, _ in agents.fake.log if "Reset" in name]
        assert put_back_calls == ["nvmlDeviceResetGpuLockedClocks"]  # the agent's, once

    @pytest.fixture
    def governor(self, agents: Agents, monkeypatch: pytest.MonkeyPatch) -> NvmlGovernor:
        """A governor that has set a clock."""
        for name in (STATE_FILE, "PYTHONPATH"):
            monkeypatch.setenv(name, agents.environ[name])
        governor = NvmlGovernor(
            nvml=agents.fake, environ=NO_ENV, guard_nvml="tuner.testing.fake_nvml:from_environment"
        )
        governor.apply(Settings(clock_MHz=900))
        return governor

    def test_a_guard_that_was_killed_is_replaced(self, governor: NvmlGovernor) -> None:
        assert governor._guard is not None
        first = governor._guard.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: is_gone(first))
        governor.apply(Settings(clock_MHz=1200))
        assert governor._guard.pid != first
        second = governor._guard.pid
        governor.close()
        wait_until(lambda: is_gone(second))

    def test_a_guard_that_dies_this_instant_is_noticed(
        self, agents: Agents, governor: NvmlGovernor
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
        assert agents.settings() == BEFORE

    def test_without_a_guard_nothing_is_touched(self, fake: FakeNVML) -> None:
        governor = NvmlGovernor(nvml=fake, environ=NO_ENV, guard_nvml="no_such_module")
        before = fake.log
        with pytest.raises(GovernorError, match="ModuleNotFoundError"):
            governor.apply(Settings(clock_MHz=900))
        assert fake.log == before
        governor.close()

    def test_a_guard_that_does_not_start_says_why(self) -> None:
        with pytest.raises(GuardError, match="no_such_module"):
            Guard(nvml="no_such_module")

    def test_put_back_does_all_it_can(self) -> None:
        fake = FakeNVML([FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")])
        fake.nvmlInit()
        problems = put_back(
            fake,
            [
                Earlier("GPU-gone", clocks_touched=True),
                Earlier("GPU-a", clocks_touched=True, locked_clocks_MHz=(300, 600)),
                Earlier("GPU-b", power_limit_mW=123_000),
            ],
        )
        assert len(problems) == 1
        assert "GPU-gone" in problems[0]
        assert fake.log == [
            ("nvmlDeviceSetGpuLockedClocks", 0, (300, 600)),
            ("nvmlDeviceSetPowerManagementLimit", 1, (123_000,)),
        ]


class TestFake:
    """The fake's own physics, since every figure of the GPU paths rests on it."""

    def test_truth_is_the_integral_of_instant_power(self) -> None:
        clock = FakeClock(0.0)
        fake = FakeNVML(
            [FakeGpu(load=((0.0, 0.2), (0.33, 1.0), (0.71, 0.0)), load_period_s=1.0)], clock=clock
        )
        fake.nvmlInit()
        handle = fake.nvmlDeviceGetHandleByIndex(0)
        total_J, step_s = 0.0, 0.001
        for number in range(4000):
            if number == 1500:
                clock.now_s = 1.5
                fake.event("lock", [900, 900])
            if number == 2600:
                clock.now_s = 2.6
                fake.event("limit_W", 150.0)
            clock.now_s = (number + 0.5) * step_s
            field = fake.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])[0]
            total_J += field.value.uiVal / 1000 * step_s
        assert fake.true_energy_J(0.0, 4.0) == pytest.approx(total_J, rel=1e-3)

    def test_the_counter_moves_in_steps_and_never_ahead_of_the_truth(self) -> None:
        clock = FakeClock(0.0)
        fake = FakeNVML([FakeGpu(counter_start_mJ=0)], clock=clock)
        fake.nvmlInit()
        handle = fake.nvmlDeviceGetHandleByIndex(0)
        values = set()
        for number in range(1, 100):
            clock.now_s = number * 0.011
            value_J = fake.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
            truth_J = fake.true_energy_J(0.0, clock.now_s)
            assert truth_J - 0.1 * 380.0 - 0.01 <= value_J <= truth_J
            values.add(value_J)
        assert len(values) == 11

    def test_a_lower_clock_draws_less_and_a_limit_lowers_the_clock(self) -> None:
        fake = FakeNVML()
        fake.nvmlInit()
        handle = fake.nvmlDeviceGetHandleByIndex(0)
        draws = []
        for clock in (1410, 1200, 900):
            fake.nvmlDeviceSetGpuLockedClocks(handle, clock, clock)
            draws.append(
                fake.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])[
                    0
                ].value.uiVal
            )
        assert draws == sorted(draws, reverse=True)
        assert draws[0] == 380_000
        fake.nvmlDeviceResetGpuLockedClocks(handle)
        fake.nvmlDeviceSetPowerManagementLimit(handle, 250_000)
        field = fake.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])[0]
        assert 240_000 < field.value.uiVal <= 250_000

    def test_it_raises_the_real_errors(self) -> None:
        fake = FakeNVML(root=False)
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            fake.nvmlDeviceGetCount()
        fake.nvmlInit()
        handle = fake.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(pynvml.NVMLError_NoPermission):
            fake.nvmlDeviceSetGpuLockedClocks(handle, 900, 900)
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            fake.nvmlDeviceGetHandleByIndex(1)
        with pytest.raises(AttributeError):
            fake.nvmlDeviceGetFanSpeed(handle)  # never the real library by accident

    def test_several_share_one_state_file(self, tmp_path: Path) -> None:
        one = FakeNVML([FakeGpu(limit_W=333.0)], state_file=tmp_path / "gpus.json")
        two = FakeNVML(state_file=tmp_path / "gpus.json")
        for fake in (one, two):
            fake.nvmlInit()
        handle = one.nvmlDeviceGetHandleByIndex(0)
        one.nvmlDeviceSetGpuLockedClocks(handle, 600, 600)
        assert two.locked_MHz() == (600, 600)
        assert two.limit_W() == 333.0
        now_s = time.monotonic()
        assert one.true_energy_J(now_s - 9, now_s) == two.true_energy_J(now_s - 9, now_s)

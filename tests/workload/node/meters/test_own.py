"""A meter of the user's own: how it is named, what is refused, and who asks it."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuner.cli.main import main
from tuner.doctor.command import node_lines
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.errors import InputError
from tuner.testing.meters import MeterContract
from tuner.workload.node.facts import inspect_node
from tuner.workload.node.meters import MeterError, Reading
from tuner.workload.node.meters.base import METER, SOCKET, own_meter, variables
from tuner.workload.node.meters.user_meter import CheckedMeter, meter_class
from tuner.workload.node.platforms import platform_of
from tuner.workload.node.platforms.cores import Cores
from tuner.workload.records.probe import MeterInfo, PowerSample

INFO = MeterInfo("pdu", "node", "a unit of the test", host="the whole node at the wall")


class Pdu:
    """Draws 200 W."""

    info = INFO
    resolution_s = 0.05

    def __init__(self) -> None:
        self.closed = False

    def read(self) -> Reading:
        if self.closed:
            raise MeterError("closed")
        now_s = time.monotonic()
        return Reading(now_s, 200.0 * now_s)

    def boundary(self, *, opens: bool) -> Reading:
        return self.read()

    def sample(self) -> PowerSample:
        return PowerSample(time.monotonic(), 200.0)

    def close(self) -> None:
        self.closed = True


class Estimate(Pdu):
    info = replace(INFO, name="guess", estimated=True)


NAME = f"{__name__}:Pdu"


class TestOwn(MeterContract):
    most_W = 250.0

    def open_meter(self) -> Pdu:
        return Pdu()


def answering(energy_J: Any, time_s: Any = None) -> Callable[[Any], Any]:
    return lambda self: Reading(time.monotonic() if time_s is None else time_s, energy_J)


class Falling(Pdu):
    def read(self) -> Reading:
        now_s = time.monotonic()
        return Reading(now_s, 1000.0 - now_s)


def raising(self: Any) -> Any:
    raise ValueError("no\nroute to the unit")


def limit_s(said: str) -> float:
    """Return the limit on a call that is to exceed it, or one that a busy machine keeps."""
    return 0.2 if "within 0.2 s" in said else 60.0


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (raising, "read failed with ValueError: no route to the unit"),
        (lambda self: "12 J", "read returned a str instead of a Reading"),
        (answering("12 J"), "energy_J of read is of type str; it must be one number"),
        (answering(math.nan), "energy_J of read is nan; it must be a finite number"),
        (answering([1.0, 2.0]), "is of type list; it must be one number: the sum over all devices"),
        (answering({"gpu0": 1.0}), "is of type dict; it must be one number: the sum over all"),
        (answering(1.0, time_s=1.7e9), "it must be of that clock"),
        (lambda self: time.sleep(5), "read did not return within 0.2 s"),
        (lambda self, channel: None, "read failed with TypeError"),
        (Falling.read, "its energy went backwards, from "),
    ],
)
def test_a_wrong_answer_is_an_error_that_names_the_class(
    read: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pdu, "read", read)
    meter = CheckedMeter(NAME, Pdu, limit_s=limit_s(said))
    with pytest.raises(MeterError) as caught:  # noqa: PT012
        meter.read()
        time.sleep(0.01)
        meter.read()
    assert str(caught.value).startswith(f"meter {NAME}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("info", {"name": "pdu"}, "info is a dict; it must be a MeterInfo"),
        ("info", replace(INFO, scope="rack"), "scope is 'rack'; it must be gpu, module or node"),
        ("info", replace(INFO, name="nvml"), "it must be a text other than nvml"),
        ("resolution_s", "1 s", "resolution_s is of type str"),
        ("resolution_s", -1.0, "resolution_s is -1, less than 0"),
        ("__init__", lambda self, address: None, "opening failed with TypeError"),
        ("__init__", lambda self: time.sleep(5), "opening did not return within 0.2 s"),
    ],
)
def test_a_meter_that_does_not_follow_the_protocol_does_not_open(
    part: str, value: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pdu, part, value)
    with pytest.raises(MeterError, match=said):
        CheckedMeter(NAME, Pdu, limit_s=limit_s(said))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pdu", "it must be MODULE:CLASS or an entry point; entry points of joulefront.meters"),
        ("no_such_module:Pdu", "module 'no_such_module' cannot be imported: ModuleNotFoundError"),
        (f"{__name__}:Psu", "has no class 'Psu'"),
        (f"{__name__}:raising", "has no class 'raising'"),
        ("pathlib:Path", "the class has no read, boundary, sample, close"),
        ("broken_meter:Pdu", "cannot be imported: SyntaxError"),
        (":Pdu", "cannot be imported"),
    ],
)
def test_a_name_that_means_no_meter_ends_the_command(
    name: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken_meter.py").write_text("class Pdu(:\n")
    monkeypatch.chdir(tmp_path)
    assert main(["optimize", "tiny-gpt", "--meter", name, "--name", "a"]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "runs").exists()


def test_a_module_beside_the_user_is_found_and_an_entry_point_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("from tests.workload.node.meters.test_own import Pdu\n")
    info = tmp_path / "site_unit-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: site-unit\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[joulefront.meters]\nunit = beside:Pdu\n")
    monkeypatch.chdir(tmp_path)
    assert meter_class("beside:Pdu") is Pdu
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert meter_class("unit") is Pdu


def test_an_agent_in_another_folder_finds_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Ray, which starts its processes elsewhere."""
    (tmp_path / "far.py").write_text("from tests.workload.node.meters.test_own import Pdu\n")
    monkeypatch.chdir(tmp_path)
    with own_meter("far:Pdu"):
        passed = variables(os.environ)
    monkeypatch.chdir("/")
    cluster = load_cluster("cpu-2")
    with closing(Cores(passed).open_meter(cluster)) as meter:
        assert meter.info == INFO
    assert not variables(os.environ)
    with pytest.raises(InputError, match="module 'nowhere' cannot be imported"):
        Cores({METER: "nowhere:Pdu"}).open_meter(cluster)
    assert (
        inspect_node(environ={METER: "nowhere:Pdu"})
        .meters[0]
        .note.startswith("meter 'nowhere:Pdu'")
    )


@pytest.fixture
def chosen() -> Iterator[None]:
    with own_meter(NAME):
        yield


def test_a_node_opens_it_instead_of_its_own(chosen: None) -> None:
    for name in ("cpu-2", "h100-32"):
        cluster = load_cluster(name)
        with closing(platform_of(cluster).open_meter(cluster)) as meter:
            assert meter.info == INFO


def test_the_name_lasts_as_long_as_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(METER, raising=False)
    cluster = load_cluster("cpu-2")
    with own_meter(NAME):
        pass
    with closing(platform_of(cluster).open_meter(cluster)) as meter:
        assert meter.info.name in ("rapl", "estimated")


def test_a_search_that_measures_nothing_takes_no_meter(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["optimize", "tiny-gpt", "--executor", "simulated", "--meter", NAME]
    assert main(words) == 2
    assert "measures nothing" in capsys.readouterr().err


def test_doctor_shows_it_or_why_it_does_not_open(
    chosen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shown,) = inspect_node().meters
    assert (shown.name, shown.available) == (NAME, True)
    monkeypatch.setattr(Pdu, "__init__", raising)
    facts = inspect_node()
    assert not facts.meters[0].available
    assert any(f"meter {NAME}: opening failed" in line for line in node_lines(facts))


def test_doctor_says_that_it_only_estimates() -> None:
    name = f"{__name__}:Estimate"
    with own_meter(name):
        energy = node_lines(inspect_node())[2]
    assert energy == f"energy    estimated by {name}, not metered: {INFO.source}"


def test_the_governor_asks_the_meter_that_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without RAPL has clocks as soon as another meter counts its energy."""
    from tuner.workload.node.clocks.cpu import CpuGovernor

    monkeypatch.setattr(CpuGovernor, "can_set", True, raising=False)
    monkeypatch.setattr(CpuGovernor, "__init__", lambda self, *a, **k: None)
    monkeypatch.setattr(CpuGovernor, "close", lambda self: None)
    cluster, cores = load_cluster("cpu-2"), Cores(sys=tmp_path)
    assert isinstance(cores.open_governor(cluster, INFO), CpuGovernor)
    fixed = cores.open_governor(cluster, replace(INFO, estimated=True))
    assert not fixed.can_set
    assert "estimated: this machine has no RAPL" in fixed.why_not
    assert not cores.open_governor(cluster).can_set  # its own meter would be the estimate
    named = Cores({METER: NAME}, sys=tmp_path)
    assert isinstance(named.open_governor(cluster), CpuGovernor)
    guess = Cores({METER: f"{__name__}:Estimate"}, sys=tmp_path)
    assert "meter guess estimates it" in guess.open_governor(cluster).why_not


def test_clocks_are_sampled_where_the_meter_does_not_tell_them(twin_node: Any) -> None:
    """Of an NVIDIA GPU too, whose own meter's samples hold them."""
    from tests.twin import TwinGpu
    from tuner.workload.node.meters.nvml import NvmlMeter

    node = twin_node(TwinGpu(load=1.0))
    with closing(NvmlMeter(environ={}, clock=node.clock, sleep=node.sleep)) as meter:
        assert meter.info.tells_clocks
        assert "clock_MHz" in meter.sample().extra
    assert not INFO.tells_clocks


@pytest.mark.slow
@pytest.mark.usefixtures("short_windows")
def test_a_search_on_a_users_meter_names_it_and_resumes_with_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["optimize", "tiny-gpt", "--cluster", "cpu-2", "--executor", "inline", "--name", "a"]
    words += ["--max-probes", "1", "--no-clocks"]
    assert main([*words, "--meter", NAME]) == 0
    assert "node scope, metered" in capsys.readouterr().err
    assert NAME not in (tmp_path / "runs" / "a" / "study.toml").read_text()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "was measured by pdu (node scope, metered)" in said
    assert "name the same meter (--meter), or give another name" in said


def test_an_installation_may_leave_meters_of_users_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, SOCKET.shipped["own"], None)
    cores = Cores({METER: "mine:Pdu"}, sys="/sys")
    with pytest.raises(InputError, match="a meter of your own needs a part of joulefront that is"):
        cores.open_meter(load_cluster("cpu-2"))
    assert main(["doctor", "--meter", "mine:Pdu"]) == 2
    assert "install all parts: pip install" in capsys.readouterr().err

"""Metrics of a tuned training: the text, the file, and the server."""

from __future__ import annotations

import math
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families as textfile_families

from tests.online.test_agent import TRAIN, Devices, live_tuning
from tuner.cli.main import main
from tuner.online.follow import PowerFollower
from tuner.online.metrics import Metrics, families
from tuner.online.windows import Mark
from tuner.search_spaces.errors import InputError
from tuner.workload.node.platforms.base import GpuFacts
from tuner.workload.records.probe import MeterInfo, PowerSample

GPUS = (GpuFacts(2, "GPU-b", "A100", 1), GpuFacts(0, "GPU-a", "A100", 1))


class Metered(Devices):
    """Devices that tell the power of each of two GPUs."""

    info = MeterInfo("nvml", "gpu", "NVML")

    def sample(self) -> PowerSample:
        of_each = {"gpu0_power_W": 100.0, "gpu0_clock_MHz": 1300.0, "gpu1_power_W": 110.0}
        return PowerSample(self.time_s, 210.0, of_each)


def parsed(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Return the samples by name and labels, without the run's, as Prometheus reads them."""
    read: list[dict[tuple[str, str], float]] = []
    for text, parser in (
        (openmetrics_text(metrics.registry), openmetrics_families),
        (generate_latest(metrics.registry), textfile_families),
    ):
        found = {}
        for family in parser(text.decode()):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k != "window"}
                inside = ",".join(f'{key}="{word}"' for key, word in sorted(labels.items()))
                found[sample.name, inside] = sample.value
        read.append(found)
    assert read[0] == read[1]
    return read[0]


class Run:
    """A tuned training of whose metrics a test moves the clock."""

    def __init__(self, path: Path | None = None) -> None:
        self.devices, self.said, self.now_s = Metered(), list[str](), 0.0
        self.live = live_tuning(self.devices)
        self.metrics = Metrics(path, announce=self.said.append, clock=lambda: self.devices.time_s)
        self.metrics.begin(self.devices, GPUS, 0.05)  # type: ignore[arg-type]
        self.steps = 0

    def train(self, steps: int) -> dict[tuple[str, str], float]:
        for _ in range(steps):
            self.steps += 1
            mark = Mark(0, self.steps, self.devices.step())
            self.live.take(mark)
            self.metrics.take(mark)
            self.metrics.take(Mark(1, 7 * self.steps, 0.0))
            self.metrics.poll(self.live.tuner, self.live.clock_MHz)
        return parsed(self.metrics)


def test_a_tuned_training_is_told_with_its_saving_and_promise() -> None:
    run = Run()
    early = run.train(20)
    assert early["joulefront_tuning", ""] == 1
    assert early["joulefront_step_time_seconds", ""] == pytest.approx(0.5)
    assert early["joulefront_clock_limit_hertz", ""] == 1.4e9
    assert early["power_monitor_gpu_power_watts", 'index="1"'] == 110
    # dcgm-exporter's number is NVML's, and a clock that a GPU does not tell is no figure.
    assert early["DCGM_FI_DEV_SM_CLOCK", 'UUID="GPU-b",gpu="2"'] == 1300
    assert len([name for name, _ in early if name == "DCGM_FI_DEV_SM_CLOCK"]) == 1
    late = run.train(1500)
    assert late["joulefront_clock_limit_hertz", ""] == 1e6 * run.devices.clock_MHz < 1.4e9
    scope = 'figure="metered",scope="gpu"'
    share = run.devices.clock_MHz / 1400
    assert late["joulefront_power_watts", scope] == pytest.approx(80 + 300 * share**2.4)
    energy_J = late["joulefront_energy_joules_total", scope]
    assert energy_J == pytest.approx(run.devices.energy_J, rel=0.01)
    assert run.steps - 5 < late["joulefront_steps_total", ""] <= run.steps
    assert late["joulefront_max_slowdown_ratio", ""] == 0.05
    assert 0 < late["joulefront_slowdown_ratio", ""] <= 0.05
    low, saved, high = (late[f"joulefront_saved_{end}joules", ""] for end in ("low_", "", "high_"))
    assert low < saved < high
    run.devices.time_s += 10
    run.metrics.poll()  # not tuned any more: what was saved is still told
    assert parsed(run.metrics)["joulefront_saved_joules", ""] == saved
    assert parsed(run.metrics)["joulefront_tuning", ""] == 0
    assert ("joulefront_clock_limit_hertz", "") not in parsed(run.metrics)


def test_a_meter_that_fails_leaves_no_old_power() -> None:
    run = Run()
    assert any("watts" in name for name, _ in run.train(20))
    run.devices.blind = True
    run.devices.time_s += 10
    run.metrics.poll(run.live.tuner, run.live.clock_MHz)
    left = {name for name, _ in parsed(run.metrics)}
    assert not any("watts" in name or "energy" in name for name in left)
    assert "joulefront_step_time_seconds" in left
    assert run.said == []


def test_a_followed_target_is_told() -> None:
    run = Run()
    follower = PowerFollower([0.0, 0.1], max_slowdown=None, window_s=8.0, settle_s=2.0)
    follower.follow(285.0)
    run.devices.step()
    run.metrics.poll(follower, 1400)
    found = parsed(run.metrics)
    assert found["joulefront_power_target_watts", 'figure="metered",scope="gpu"'] == 285


def test_labels_are_escaped_and_figures_that_are_none_left_out(tmp_path: Path) -> None:
    path = tmp_path / 'a"b\\c\nd\udcff.prom'
    metrics = Metrics(path)
    assert path.read_text().splitlines()[2:] == [r'joulefront_tuning{window="a\"b\\c\nd?"} 0.0']
    assert parsed(metrics) == {("joulefront_tuning", ""): 0.0}
    values = {"joulefront_saved_joules": math.nan, "joulefront_power_watts": math.inf}
    assert families((name, {}, value) for name, value in values.items()) == []


def test_the_file_holds_the_latest_and_is_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "job7.prom"
    run = Run(path)
    assert 'window="job7"' in path.read_text()
    run.train(20)
    assert path.read_bytes() == generate_latest(run.metrics.registry)
    assert [each.name for each in tmp_path.iterdir()] == ["job7.prom"]
    Metrics(path)  # left by a run that was killed
    run.metrics.close()
    assert not path.exists()
    run.metrics.close()


def test_a_folder_that_goes_is_one_sentence_and_the_training_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "collector"
    folder.mkdir()
    run = Run(folder / "a.prom")
    (folder / "a.prom").unlink()
    folder.rmdir()
    run.train(40)
    assert len(run.said) == 1
    assert "not up to date" in run.said[0]


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print()")
    with pytest.raises(InputError, match="holds no metrics"):
        Metrics(script)
    assert script.read_text() == "print()"
    with pytest.raises(InputError, match="cannot be written"):
        Metrics(tmp_path)
    with pytest.raises(InputError, match="cannot be written"):
        Metrics(tmp_path / "nowhere" / "a.prom")


def test_metrics_are_served_on_loopback() -> None:
    run = Run()
    with run.metrics.served("0"):
        (sentence,) = run.said
        url = sentence.removeprefix("metrics are at ")
        assert url.startswith("http://127.0.0.1:")
        run.train(20)
        # As Prometheus asks; what it is given first is the latest, not what stood at the start.
        asked = urllib.request.Request(url, headers={"Accept": CONTENT_TYPE_LATEST})
        with urllib.request.urlopen(asked, timeout=10) as reply:
            assert reply.headers["Content-Type"].startswith("application/openmetrics-text")
            assert reply.read() == openmetrics_text(run.metrics.registry)
        with urllib.request.urlopen(f"{url}?name[]=joulefront_tuning", timeout=10) as reply:
            assert b"joulefront_tuning" in reply.read()
        port = int(url.split(":")[2].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port)):  # an idle client delays no other
            urllib.request.urlopen(url, timeout=10).close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=10).close()


@pytest.mark.parametrize(
    "address", ["x", "65536", "-1", "²", "localhost", "no.such.host.invalid:1"]
)
def test_an_address_that_is_none_is_one_sentence(address: str) -> None:
    with pytest.raises(InputError), Metrics().served(address):
        pass


def test_without_prometheus_client_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    words = ["run", "--tune", "--metrics-port", "0", "--", "python", str(TRAIN), "1", "0"]
    assert main(words) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "[metrics]'" in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_port_that_is_taken_starts_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        path = tmp_path / "a.prom"
        words = ["run", "--tune", "--metrics-port", port, "--metrics-file", str(path)]
        assert main([*words, "--", "python", str(TRAIN), "1", "0"]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert port in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not path.exists()
    assert main(["run", "--metrics-port", port, "study"]) == 2
    assert "for --tune" in capfd.readouterr().err


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """The address of metrics on loopback; a server takes half a second to end."""
    said: list[str] = []
    with Metrics(announce=said.append).served("0"):
        yield said[0].rpartition(" ")[2]


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        *(("attacker.example", 403), ("attacker.example:{port}", 403), ("127.0.0.1.x.org", 403)),
        *(("localhost", 200), ("LOCALHOST:{port}", 200), ("127.0.0.1:9", 200), ("[::1]", 200)),
        *(("localhost:1@evil.com", 403), ("", 403)),
    ],
)
def test_metrics_on_loopback_are_not_for_pages_of_other_sites(
    served: str, asked: str, status: int
) -> None:
    port = served.split(":")[2].partition("/")[0]
    request = urllib.request.Request(served, headers={"Host": asked.format(port=port)})
    if status == 200:
        urllib.request.urlopen(request, timeout=10).close()
        return
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        urllib.request.urlopen(request, timeout=10)
    assert refused.value.read() == b"These metrics are read as localhost only.\n"

"""Metrics of a tuned training: the text, the file, and the server."""

from __future__ import annotations

import importlib.util
import math
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.online.test_agent import TRAIN, Devices, live_tuning
from tuner.cli.main import main
from tuner.display.server import CONTENT_TYPE, served_metrics
from tuner.online.follow import PowerFollower
from tuner.online.marks import Mark
from tuner.online.metrics import METRICS, Metrics, openmetrics
from tuner.search_spaces.errors import InputError
from tuner.workload.meters import PowerSample
from tuner.workload.platforms.base import GpuFacts
from tuner.workload.probe import MeterInfo

GPUS = (GpuFacts(2, "GPU-b", "A100", 1), GpuFacts(0, "GPU-a", "A100", 1))


class Metered(Devices):
    """Devices that tell the power of each of two GPUs."""

    info = MeterInfo("nvml", "gpu", "NVML")

    def sample(self) -> PowerSample:
        of_each = {"gpu0_power_W": 100.0, "gpu0_clock_MHz": 1300.0, "gpu1_power_W": 110.0}
        return PowerSample(self.time_s, 210.0, of_each)


PARSERS = ("prometheus_client.openmetrics.parser", "prometheus_client.parser")
if importlib.util.find_spec("prometheus_client") is None:
    PARSERS = ()


def parsed(text: str) -> dict[tuple[str, str], float]:
    """Return the samples by name and labels, without the run's; the format is checked."""
    lines = text.splitlines()
    assert text.endswith("# EOF\n")
    found, described = {}, ""
    for line in lines[:-1]:
        if line.startswith("# TYPE"):
            described = line.split()[2]
        elif not line.startswith("# HELP"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            total = "_total" if METRICS[described][0] == "counter" else ""
            assert name == described + total
            kept = [word for word in labels[:-1].split(",") if not word.startswith("window=")]
            found[name, ",".join(kept)] = float(value)
    for name in PARSERS:  # as Prometheus reads it, and as the textfile collector does
        families = list(importlib.import_module(name).text_string_to_metric_families(text))
        assert sum(len(family.samples) for family in families) == len(found)
    return found


class Run:
    """A tuned training of whose metrics a test moves the clock."""

    def __init__(self, path: Path | None = None) -> None:
        self.devices, self.said, self.now_s = Metered(), list[str](), 0.0
        self.live = live_tuning(self.devices)
        self.metrics = Metrics(path, say=self.said.append, clock=lambda: self.devices.time_s)
        self.metrics.begin(self.devices, GPUS, 0.05)  # type: ignore[arg-type]
        self.steps = 0

    def train(self, steps: int) -> dict[tuple[str, str], float]:
        for _ in range(steps):
            self.steps += 1
            mark = Mark(0, self.steps, self.devices.step())
            self.live.take(mark)
            self.metrics.take(mark)
            self.metrics.take(Mark(1, 7 * self.steps, 0.0))
            self.metrics.look(self.live.tuner, self.live.clock_MHz)
        return parsed(self.metrics.text)


def test_a_tuned_training_is_told_with_its_saving_and_promise() -> None:
    run = Run()
    early = run.train(20)
    assert early["joulefront_tuning", ""] == 1
    assert early["joulefront_step_time_seconds", ""] == pytest.approx(0.5)
    assert early["joulefront_clock_limit_hertz", ""] == 1.4e9
    assert early["power_monitor_gpu_power_watts", 'index="1"'] == 110
    # dcgm-exporter's number is NVML's, and a clock that a GPU does not tell is no figure.
    assert early["DCGM_FI_DEV_SM_CLOCK", 'gpu="2",UUID="GPU-b"'] == 1300
    assert len([name for name, _ in early if name == "DCGM_FI_DEV_SM_CLOCK"]) == 1
    late = run.train(1500)
    assert late["joulefront_clock_limit_hertz", ""] == 1e6 * run.devices.clock_MHz < 1.4e9
    scope = 'scope="gpu",figure="metered"'
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
    run.metrics.look()  # not tuned any more: what was saved is still told
    assert parsed(run.metrics.text)["joulefront_saved_joules", ""] == saved
    assert parsed(run.metrics.text)["joulefront_tuning", ""] == 0
    assert ("joulefront_clock_limit_hertz", "") not in parsed(run.metrics.text)


def test_a_meter_that_fails_leaves_no_old_power() -> None:
    run = Run()
    assert any("watts" in name for name, _ in run.train(20))
    run.devices.blind = True
    run.devices.time_s += 10
    run.metrics.look(run.live.tuner, run.live.clock_MHz)
    left = {name for name, _ in parsed(run.metrics.text)}
    assert not any("watts" in name or "energy" in name for name in left)
    assert "joulefront_step_time_seconds" in left
    assert run.said == []


def test_a_followed_target_is_told() -> None:
    run = Run()
    follower = PowerFollower([0.0, 0.1], max_slowdown=None, window_s=8.0, settle_s=2.0)
    follower.target_W = 285.0
    run.devices.step()
    run.metrics.look(follower, 1400)
    found = parsed(run.metrics.text)
    assert found["joulefront_power_target_watts", 'scope="gpu",figure="metered"'] == 285


def test_labels_are_escaped_and_figures_that_are_none_left_out() -> None:
    text = openmetrics(
        [
            ("joulefront_tuning", {"window": 'a"b\\c\nd\udcff'}, 1),
            ("joulefront_saved_joules", {}, math.nan),
            ("joulefront_power_watts", {}, math.inf),
        ]
    )
    assert text.splitlines()[2:] == [r'joulefront_tuning{window="a\"b\\c\nd?"} 1.0', "# EOF"]


def test_the_file_holds_the_latest_and_is_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "job7.prom"
    run = Run(path)
    assert 'window="job7"' in path.read_text()
    run.train(20)
    assert path.read_text() == run.metrics.text
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
    said: list[str] = []
    latest = ["# EOF\n"]
    with served_metrics(lambda: latest[0], "0", said.append):
        (sentence,) = said
        url = sentence.removeprefix("metrics are at ")
        assert url.startswith("http://127.0.0.1:")
        latest[0] = openmetrics([("joulefront_tuning", {}, 1)])
        with urllib.request.urlopen(url, timeout=10) as reply:
            assert reply.headers["Content-Type"] == CONTENT_TYPE
            assert reply.read().decode() == latest[0]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/../etc/passwd", timeout=10)
        port = int(url.split(":")[2].partition("/")[0])
        # Another host must be named; and a client that says nothing keeps no other waiting.
        with socket.create_connection(("127.0.0.1", port)):
            urllib.request.urlopen(url, timeout=10).close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=10).close()


@pytest.mark.parametrize(
    "address", ["x", "65536", "-1", "²", "localhost", "no.such.host.invalid:1"]
)
def test_an_address_that_is_none_is_one_sentence(address: str) -> None:
    with pytest.raises(InputError), served_metrics(str, address, print):
        pass


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

"""The example: a meter that integrates the watts in a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.by_path import module_at
from tuner.testing.meters import MeterContract
from tuner.workload.node.meters import MeterError

EXAMPLE = Path(__file__).parents[4] / "examples" / "meter" / "watts_file.py"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = module_at(EXAMPLE)
    monkeypatch.setenv("WATTS_FILE", str(tmp_path / "watts"))
    monkeypatch.setattr(module, "PERIOD_S", 0.1)
    monkeypatch.setattr(module.WattsFile, "resolution_s", 0.1)
    return module


@pytest.fixture
def site(example: Any, tmp_path: Path) -> Iterator[None]:
    """A unit that draws 400 W and appends a line now and then."""
    file, ended = tmp_path / "watts", threading.Event()

    def write() -> None:
        while True:
            with file.open("a") as opened:
                opened.write(f"{time.time()} 400\n")
            if ended.wait(0.1):
                return

    file.write_text(f"{time.time()} 400\n")
    thread = threading.Thread(target=write)
    thread.start()
    yield
    ended.set()
    thread.join()


@pytest.mark.usefixtures("site")
class TestWattsFile(MeterContract):
    most_W = 450.0

    @pytest.fixture(autouse=True)
    def _of_example(self, example: Any) -> None:
        self.example = example

    def open_meter(self) -> Any:
        return self.example.WattsFile()


def test_without_a_fresh_line_there_is_no_power(example: Any, tmp_path: Path) -> None:
    file = tmp_path / "watts"
    with pytest.raises(MeterError, match="no power can be read"):
        example.WattsFile()
    file.write_text("seconds watts\n")
    with pytest.raises(MeterError, match="no power can be read"):
        example.WattsFile()
    file.write_text(f"{time.time() - 60} 400\n")
    with pytest.raises(MeterError, match="is older than 10 s"):
        example.WattsFile()
    file.write_text(f"{time.time()} 400\n")
    with closing(example.WattsFile()) as meter:
        first = meter.read()
        time.sleep(0.3)
        second = meter.read()
    spent_J = second.energy_J - first.energy_J
    assert spent_J == pytest.approx(400.0 * (second.time_s - first.time_s), rel=1e-6)

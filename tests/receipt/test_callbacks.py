"""Energy in the own logs of transformers' Trainer, Lightning and Accelerate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tuner
from tests.support.trainers import small_lightning, small_trainer
from tuner.callbacks import EnergyLog, log_energy
from tuner.search_spaces.errors import InputError
from tuner.workload.node.meters import MeterError, Reading
from tuner.workload.records.probe import MeterInfo


class Meter:
    """Meter of 100 W whose clock moves by a second with each reading."""

    resolution_s = 0.1

    def __init__(self, *, estimated: bool = False) -> None:
        self.info = MeterInfo("nvml", "gpu", "a test", estimated=estimated)
        self.time_s, self.fails = 0.0, False

    def read(self) -> Reading:
        if self.fails:
            raise MeterError("the counter stands still")
        self.time_s += 1.0
        return Reading(self.time_s, 100 * self.time_s)

    def close(self) -> None:
        self.fails = True


def test_energy_power_and_energy_a_step() -> None:
    log = EnergyLog(Meter())  # type: ignore[arg-type]
    assert log.metrics(10) == {"energy/gpu_J": 100.0, "energy/gpu_W": 100.0}
    assert log.metrics(30) == {
        **{"energy/gpu_J": 200.0, "energy/gpu_W": 100.0},
        "energy/gpu_J_per_step": 5.0,
    }
    assert "energy/gpu_J_per_step" not in log.metrics(30)
    assert "energy/gpu_J_per_step" not in log.metrics()


def test_the_name_says_that_energy_is_estimated() -> None:
    log = EnergyLog(Meter(estimated=True))  # type: ignore[arg-type]
    assert "energy/gpu_estimated_J" in log.metrics()


def test_a_meter_that_fails_is_no_reason_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter()
    log = EnergyLog(meter)  # type: ignore[arg-type]
    meter.fails = True
    assert log.metrics(1) == {}
    assert "the counter stands still" in caplog.text


def test_something_else_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be logged by a dict"):
        log_energy({})
    assert tuner.log_energy is log_energy


@pytest.mark.real
@pytest.mark.slow
def test_a_trainer_reports_energy_wherever_it_reports(tmp_path: Path) -> None:
    trainer, reporter = small_trainer(tmp_path, max_steps=4, logging_steps=2)
    log_energy(trainer, Meter())  # type: ignore[arg-type]
    trainer.train()
    assert [entry["energy/gpu_J"] for entry in reporter.reported] == [100.0, 200.0, 300.0]
    assert reporter.reported[1]["energy/gpu_J_per_step"] == 50.0
    trainer.save_state()
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert history[1]["energy/gpu_J"] == 200.0


@pytest.mark.real
def test_lightning_logs_energy_with_its_own_logger(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    trainer, fit = small_lightning(
        lightning, max_steps=6, log_every_n_steps=2, logger=CSVLogger(str(tmp_path))
    )
    log_energy(trainer, Meter())  # type: ignore[arg-type]
    fit()
    (file,) = tmp_path.rglob("metrics.csv")
    header, *rows = file.read_text().splitlines()
    assert "energy/gpu_J_per_step" in header
    at = header.split(",").index("energy/gpu_J")
    assert [float(row.split(",")[at]) for row in rows] == [100.0, 200.0, 300.0]


@pytest.mark.real
def test_an_accelerator_logs_energy_with_its_trackers(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker, on_main_process

    logged: list[tuple[dict[str, float], int | None]] = []

    class Tracker(GeneralTracker):
        name, requires_logging_directory, tracker = "test", False, None

        @on_main_process
        def store_init_configuration(self, values: dict[str, Any]) -> None:
            pass

        @on_main_process
        def log(self, values: dict[str, Any], step: int | None, **_: Any) -> None:
            logged.append((values, step))

    accelerator = Accelerator(cpu=True, log_with=Tracker())
    accelerator.init_trackers("run")
    log_energy(accelerator, Meter())  # type: ignore[arg-type]
    accelerator.log({"loss": 2.0}, step=1)
    accelerator.log({"loss": 1.0}, step=5)
    assert logged[0] == ({"loss": 2.0, "energy/gpu_J": 100.0, "energy/gpu_W": 100.0}, 1)
    assert logged[1][0]["energy/gpu_J_per_step"] == 25.0

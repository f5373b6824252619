"""Live metrics in W&B, MLflow and TensorBoard."""

from __future__ import annotations

from pathlib import Path

import pytest

import tuner
from tests.support.studies import run_replay, write_table

pytestmark = pytest.mark.usefixtures("next_candidates")


class Writer:
    """TensorBoard's SummaryWriter by its documentation; the package is not installed."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}
        self.flushed = 0

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.setdefault(tag, []).append((global_step, scalar_value))

    def flush(self) -> None:
        self.flushed += 1


def search(tmp_path: Path, tracker: object) -> tuner.Result:
    return run_replay(
        write_table(tmp_path / "table"),
        name="run",
        runs_dir=tmp_path / "runs",
        report=False,
        max_probes=3,
        on_progress=tuner.track(tracker),
    )


def test_tensorboard_gets_each_probe_once_and_in_order(tmp_path: Path) -> None:
    writer = Writer()
    result = search(tmp_path, writer)
    steps = [step for step, _ in writer.scalars["joulefront/spent_kJ"]]
    assert steps == list(range(1, result.spent.probes + 1)) == list(range(1, writer.flushed + 1))
    assert writer.scalars["joulefront/spent_kJ"][-1][1] == pytest.approx(result.spent.energy_kJ)
    least = writer.scalars["joulefront/least_energy_to_solution_kJ"]
    assert min(value for _, value in least) > 0


def test_mlflow_gets_metrics_of_the_active_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    with mlflow.start_run() as run:
        result = search(tmp_path, mlflow)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "joulefront/probes")
    assert [metric.step for metric in history] == list(range(1, result.spent.probes + 1))


def test_wandb_gets_a_step_a_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = wandb.init(dir=tmp_path, settings=wandb.Settings(console="off", silent=True))
    result = search(tmp_path, run)
    assert run.summary["joulefront/probes"] == result.spent.probes
    run.finish()
    wandb.teardown()


def test_what_cannot_be_logged_to_is_refused() -> None:
    with pytest.raises(tuner.InputError, match="cannot log to list; give a W&B run"):
        tuner.track([])

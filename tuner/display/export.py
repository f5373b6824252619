"""A result for other tools: CSV, Parquet, Kernel Tuner's T4, Weights & Biases and MLflow.

Every format is written from the same rows: one a point, one column a knob, units in the names. The
rows are plain dicts, so CSV and T4 need nothing installed; pandas, wandb and mlflow are imported by
the one function that uses each. Nothing here talks to a server unless the user's own settings of
wandb or mlflow say so.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.formatting import ordered_knobs
from tuner.results.parts import Point
from tuner.results.result import Result
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.safe_files import make_folder, require_own, write_bytes, write_text
from tuner.workload.probe import FailureKind

if TYPE_CHECKING:
    import pandas

__all__ = ["FORMATS", "export_result", "frame", "rows", "t4_results"]

#: What a failed probe is in the T4 results schema ("invalidity", version 1.0.0).
_INVALIDITY: dict[FailureKind, str] = {
    "refused": "constraints",
    "not_taken": "constraints",
    "out_of_memory": "runtime",
    "crash": "runtime",
    "hang": "timeout",
    "time_limit": "timeout",
    "cancelled": "runtime",
}


def _needs(name: str, extra: str | None = None) -> Any:
    """Import an optional package, or raise an error that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        wanted = f"'joulefront[{extra}]'" if extra else name.replace("mlflow", "mlflow-skinny")
        raise InputError(
            f"{name} is not installed; install it with pip install {wanted}"
        ) from error


def _cell(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def rows(result: Result, points: Sequence[Point] | None = None) -> list[dict[str, Any]]:
    """One flat dict a point: its knobs, then its figures.

    Args:
        result: the answer.
        points: which of its points; all of them, fastest first, when not given.

    Returns:
        Dicts of the same keys: each knob that any point of the result sets (None where a point
        leaves it alone; one value a stage is joined by commas), then `energy_to_solution_kJ` and
        `time_to_solution_s` with the ends of their 90 % intervals, `power_W`, and what is known of
        how they were obtained.
    """
    known = {p.configuration: p for p in (*result.points, *result.front_points)}
    if points is None:
        points = sorted(known.values(), key=lambda p: p.time_to_solution_s)
    names = ordered_knobs([*known, *(p.configuration for p in points)])
    front = {p.configuration for p in result.front_points}
    best = result.best.configuration if result.best else None
    baseline = result.baseline.configuration if result.baseline else None
    table = []
    for p in points:
        peak = p.peak_memory_bytes
        table.append(
            {
                **{name: _cell(p.configuration.get(name)) for name in names},
                "energy_to_solution_kJ": p.energy_to_solution_kJ,
                "energy_low_kJ": p.energy_interval_kJ[0],
                "energy_high_kJ": p.energy_interval_kJ[1],
                "time_to_solution_s": p.time_to_solution_s,
                "time_low_s": p.time_interval_s[0],
                "time_high_s": p.time_interval_s[1],
                "power_W": p.power_W,
                "p_nondominated": p.p_nondominated,
                "on_front": p.configuration in front,
                "chosen": p.configuration == best,
                "baseline": p.configuration == baseline,
                "source": p.source,
                "windows": p.windows,
                "peak_memory_GB": peak / 1e9 if peak is not None else None,
                "energy_scope": p.meter.scope,
                "energy_from": p.meter.source,
                "energy_estimated": p.meter.estimated,
                "energy_twin": p.meter.twin,
                "flags": "; ".join(p.flags),
            }
        )
    return table


def frame(result: Result, points: Sequence[Point] | None = None) -> pandas.DataFrame:
    """`rows` as a pandas DataFrame.

    Raises:
        InputError: pandas is not installed; the extra `notebook` brings it.
    """
    return _needs("pandas", "notebook").DataFrame(rows(result, points))


def _csv_cell(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula: such a text gets an apostrophe in
    front (OWASP, "CSV Injection"). Numbers stay as they are."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return value
    with contextlib.suppress(ValueError):
        float(value)
        return value
    return f"'{value}"


def _to_csv(result: Result, out: Path) -> None:
    table = rows(result)
    names = list(table[0]) if table else ["energy_to_solution_kJ"]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(map(_csv_cell, names))
    writer.writerows(map(_csv_cell, row.values()) for row in table)
    write_text(out, text.getvalue())


def _to_parquet(result: Result, out: Path) -> None:
    _needs("pyarrow", "notebook")
    table = frame(result)
    for name in table.columns:
        if table[name].map(type).nunique() > 1 and table[name].dtype == object:
            # One column, one type: a knob that is a number here and one value a stage there.
            table[name] = table[name].map(lambda value: None if value is None else str(value))
    write_bytes(out, table.to_parquet(index=False))


def t4_results(result: Result) -> dict[str, Any]:
    """Return the result in Kernel Tuner's T4 auto-tuning results format, schema version 1.0.0.

    The schema is the one of the TuningSchema project that Kernel Tuner ships. Objectives are given
    in the unit of their names. `runtimes` holds every step that was timed, in milliseconds, as
    Kernel Tuner's own files do; `compilation_time` is 0, because a launch is paid once a probe and
    not a configuration. Failed probes are results too, with their `invalidity`.
    """
    entries = []
    for p in sorted(result.points, key=lambda p: p.time_to_solution_s):
        windows = result.windows.get(p.configuration, ())
        runtimes = [1000 * s for window in windows for s in window.step_times_s]
        figures = (
            ("energy_to_solution_kJ", p.energy_to_solution_kJ, "kJ"),
            ("time_to_solution_s", p.time_to_solution_s, "s"),
            ("power_W", p.power_W, "W"),
            ("p_nondominated", p.p_nondominated, ""),
        )
        entries.append(
            {
                "configuration": _t4_configuration(p.configuration),
                "objectives": ["energy_to_solution_kJ", "time_to_solution_s"],
                "times": _t4_times(runtimes),
                "invalidity": "correct",
                "correctness": 1,
                "measurements": [
                    {"name": name, "value": value, "unit": unit}
                    for name, value, unit in figures
                    if math.isfinite(value)
                ],
            }
        )
    measured = {p.configuration for p in result.points}
    for record in result.failures:
        assert record.failure is not None
        for configuration in record.request.configurations():
            if configuration not in measured:
                entries.append(
                    {
                        "timestamp": record.started_at,
                        "configuration": _t4_configuration(configuration),
                        "objectives": ["energy_to_solution_kJ", "time_to_solution_s"],
                        "times": _t4_times([]),
                        "invalidity": _INVALIDITY[record.failure.kind],
                        "correctness": 0,
                        "measurements": [
                            {"name": "failure", "value": record.failure.message, "unit": ""}
                        ],
                    }
                )
    return {"schema_version": "1.0.0", "results": entries}


def _t4_configuration(configuration: Any) -> dict[str, Any]:
    knobs = {**configuration.launch, **configuration.live}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in knobs.items()}


def _t4_times(runtimes: list[float]) -> dict[str, Any]:
    zero = dict.fromkeys(("compilation_time", "framework", "search_algorithm", "validation"), 0.0)
    return {**zero, "runtimes": runtimes}


def _to_t4(result: Result, out: Path) -> None:
    write_text(out, json.dumps(t4_results(result), indent=1, allow_nan=False) + "\n")


def _finite(figures: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in figures.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _summary(result: Result) -> dict[str, float]:
    """Summarize choice, baseline and cost of the search in a few numbers."""
    figures: dict[str, Any] = {
        "front_points": len(result.front_points),
        "points": len(result.points),
        "search_kJ": result.spent.energy_kJ,
        "search_s": result.spent.time_s,
        "probes": result.spent.probes,
        "probes_failed": result.spent.failed,
    }
    for name, point in (("best", result.best), ("baseline", result.baseline)):
        if point is not None:
            figures[f"{name}_energy_to_solution_kJ"] = point.energy_to_solution_kJ
            figures[f"{name}_time_to_solution_s"] = point.time_to_solution_s
            figures[f"{name}_power_W"] = point.power_W
    return _finite(figures)


def _to_wandb(result: Result, out: Path) -> None:
    """One run: the choice as its summary, the points as a table, the search as two curves."""
    wandb = _needs("wandb")
    out.mkdir(parents=True, exist_ok=True)
    into = out.parent if out.name == "wandb" else out  # wandb makes a folder of its name there
    run = wandb.init(
        project="joulefront",
        name=result.name,
        dir=str(into),
        reinit="create_new",  # a run that the user has open stays open
        # Offline unless the user's own environment says otherwise; `wandb sync` sends it later.
        mode=os.environ.get("WANDB_MODE", "offline"),
        config={
            "constraints": dict(result.constraints),
            "choice": result.choice.sentence,
            "recommendation": result.recommendation.headline if result.recommendation else None,
            "best": _t4_configuration(result.best.configuration) if result.best else None,
        },
        settings=wandb.Settings(console="off", silent=True),
    )
    try:
        for energy_kJ, volume in result.progress:
            run.log({"probing_kJ": energy_kJ, "front_hypervolume": volume})
        table = rows(result)
        if table:
            names = list(table[0])
            run.log({"points": wandb.Table(names, [[row[n] for n in names] for row in table])})
        run.summary.update(_summary(result))
    finally:
        run.finish()


def _to_mlflow(result: Result, out: Path) -> None:
    """One parent run with the choice, one child run a point with its knobs and figures.

    The file store is what needs neither a server nor a database; MLflow 3 keeps it in maintenance
    and wants to be told that it is meant.
    """
    _needs("mlflow")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.tracking import MlflowClient

    out.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or out.resolve().as_uri())
    found = client.get_experiment_by_name("joulefront")
    experiment = found.experiment_id if found else client.create_experiment("joulefront")

    def keep(run_id: str, metrics: dict[str, float], params: dict[str, Any]) -> None:
        client.log_batch(
            run_id,
            metrics=[Metric(name, value, 0, 0) for name, value in metrics.items()],
            params=[Param(name, str(value)) for name, value in params.items() if value is not None],
        )
        client.set_terminated(run_id)

    parent = client.create_run(experiment, run_name=result.name).info.run_id
    client.set_tag(parent, "joulefront.choice", result.choice.sentence)
    if result.recommendation is not None:
        client.set_tag(parent, "joulefront.recommendation", result.recommendation.headline)
    if result.report_path is not None and Path(result.report_path).is_file():
        client.log_artifact(parent, str(result.report_path))
    chosen = _t4_configuration(result.best.configuration) if result.best else {}
    keep(parent, _summary(result), {**chosen, **result.constraints})
    names = ordered_knobs(p.configuration for p in (*result.points, *result.front_points))
    for p, row in zip(result.points, rows(result, result.points), strict=True):
        knobs = {name: row.pop(name) for name in names}
        tags = [RunTag("mlflow.parentRunId", parent), RunTag("joulefront.source", p.source)]
        child = client.create_run(
            experiment,
            run_name=p.configuration.key[:200],
            tags={tag.key: tag.value for tag in tags},
        )
        keep(child.info.run_id, _finite(row), knobs)


@dataclass(frozen=True)
class _Format:
    write: Callable[[Result, Path], None]
    ending: str


#: The formats by name; an ending that begins with "/" is a folder's name.
FORMATS = {
    "csv": _Format(_to_csv, ".csv"),
    "parquet": _Format(_to_parquet, ".parquet"),
    "t4": _Format(_to_t4, ".t4.json"),
    "wandb": _Format(_to_wandb, "/wandb"),
    "mlflow": _Format(_to_mlflow, "/mlruns"),
}


def export_result(result: Result, to: str, out: str | Path | None = None) -> Path:
    """Write a result in another tool's format.

    Args:
        result: the answer.
        to: "csv", "parquet", "t4" (Kernel Tuner's results JSON), "wandb" or "mlflow".
        out: the file, or the folder for wandb (its runs are offline unless WANDB_MODE says
            otherwise) and mlflow (a file store; MLFLOW_TRACKING_URI wins). In the run's folder, or
            here where there is none, when not given.

    Returns:
        The file or folder written.

    Raises:
        UnknownName: there is no such format.
        InputError: a package that it needs is not installed, the file cannot be written, or it
            would go to a run folder of another user.
    """
    if to not in FORMATS:
        raise UnknownName("format", to, list(FORMATS))
    chosen = FORMATS[to]
    folder = result.run_dir if result.run_dir is not None else Path()
    default = (
        folder / chosen.ending[1:]
        if chosen.ending.startswith("/")
        else folder / f"{result.name}{chosen.ending}"
    )
    path = Path(out) if out is not None else default
    if out is None and result.run_dir is not None:
        require_own(folder)
    try:
        if out is None and chosen.ending.startswith("/"):
            make_folder(path, inside=folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        chosen.write(result, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    return path

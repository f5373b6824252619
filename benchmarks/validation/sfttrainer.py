"""Throughput and power of FSDP on A100, from 512 tokens of one GPU in a pass to 16,384.

Full fine-tuning by TRL's SFTTrainer (`benchmarks/data/sfttrainer.md`). `unit_s` of all NVIDIA GPUs
is fitted to Llama-3.1 8B; ALLaM-1 13B is held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.figures import Figure
from benchmarks.validation.comparison import DATA, models, rows_of, table
from tuner.models.analytic.constants import Constants, constants_of
from tuner.models.analytic.model import AnalyticModel
from tuner.models.prior import Prediction
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import Program, TrainingJob

FITTED = "llama-3.1-8b"
#: Passes of a step, and most tokens of one GPU in a pass that is called short.
ACCUMULATION, SHORT = 4, 512
PROGRAM = Program(dropout="none", pure_bf16=True)


@dataclass(frozen=True)
class Run:
    row: dict[str, str]

    @property
    def tokens(self) -> int:
        """Tokens of one GPU in one pass."""
        return int(self.row["sequence_length"]) * int(self.row["batch"]) // int(self.row["gpus"])

    @property
    def measured_s(self) -> float:
        """Seconds of a step."""
        gpus = int(self.row["gpus"])
        return ACCUMULATION * self.tokens * gpus / float(self.row["tokens_per_s"])

    def predicted(self, constants: Constants | None = None) -> Prediction:
        """Return the prediction of this run alone."""
        batch, gpus = int(self.row["batch"]), int(self.row["gpus"])
        job = TrainingJob(
            self.row["model"],
            models()[self.row["model"]],
            sequence_length=int(self.row["sequence_length"]),
            global_batch=batch * ACCUMULATION,
            steps=1,
            program=PROGRAM,
        )
        configuration = Configuration.of(
            data_parallel=gpus,
            micro_batch=batch // gpus,
            sharding="fsdp2",
            activation_checkpointing="full",
        )
        model = AnalyticModel(job, load_cluster("a100-8"), constants=constants)
        return model.predict([configuration])

    def speed_error(self, constants: Constants | None = None) -> float:
        """Return the error of the predicted tokens a second, as a share of the measured."""
        return self.measured_s / float(self.predicted(constants).step_time_s[0]) - 1

    @property
    def power_error(self) -> float | None:
        """Error of the predicted power; None if none was measured."""
        if not self.row["power_W"]:
            return None
        said = float(self.predicted().power_W[0]) / int(self.row["gpus"])
        return said / float(self.row["power_W"]) - 1


def read_runs() -> list[Run]:
    return [Run(row) for row in rows_of(DATA / "sfttrainer_runs.csv")]


def fitted_unit_s(runs: Sequence[Run]) -> float:
    """Return the `unit_s` of least squares of log time."""
    from scipy.optimize import minimize_scalar

    base = constants_of(load_cluster("a100-8").device)

    def misfit(unit_s: float) -> float:
        constants = replace(base, unit_s=unit_s)
        return sum(float(np.log1p(run.speed_error(constants))) ** 2 for run in runs)

    return float(minimize_scalar(misfit, bounds=(0.0, 0.02), method="bounded").x)


def compare() -> tuple[list[str], list[Figure]]:
    """Return the comparison as lines, one for each number of tokens and GPUs, and figures."""
    runs = read_runs()
    errors = np.array([run.speed_error() for run in runs])
    held_out = np.array([run.row["model"] != FITTED for run in runs])
    short = np.array([run.tokens <= SHORT for run in runs])
    powers = [run.power_error for run in runs]
    short_powers = [abs(p) for p, is_short in zip(powers, short, strict=True) if p and is_short]
    rows = [
        (
            f"{r['model']} on {r['gpus']}",
            f"{r['sequence_length']} x {run.tokens // int(r['sequence_length'])}",
            f"{run.measured_s / ACCUMULATION:.3f} s",
            f"{100 * error:+.0f} %",
            "" if power is None else f"{100 * power:+.0f} %",
            "held out" if out else "tuned",
        )
        for run, error, power, out in zip(runs, errors, powers, held_out, strict=True)
        for r in (run.row,)
    ]
    heads = ("FSDP on A100", "a GPU and pass", "pass", "speed off", "power off", "rows")
    return table(heads, rows), [
        Figure("short_sequences_worst", 100 * float(np.abs(errors[short]).max()), "%"),
        Figure("short_sequences_power_worst", 100 * max(short_powers), "%"),
        Figure("sfttrainer_fitted_mean", 100 * float(np.abs(errors[~held_out]).mean()), "%"),
        Figure("sfttrainer_held_out_mean", 100 * float(np.abs(errors[held_out]).mean()), "%"),
    ]

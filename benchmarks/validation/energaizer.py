"""Which clock needs the least energy: the analytic models on EnergAIzer's measurements.

20 forward passes on one A100 of 250 W at 11 clocks (`benchmarks/data/energaizer.md`). The models
know training steps: each pass is compared with the micro-batches of a step without a head, whose
optimizer is spread over a thousand of them, and which computes three times as much. EnergAIzer's
own estimates of six of the passes are judged likewise.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.figures import Figure
from benchmarks.validation.comparison import table
from benchmarks.validation.gpt2 import gpt2
from benchmarks.validation.vtrain import DATA
from tuner.models.analytic.constants import Constants, constants_of
from tuner.models.analytic.model import AnalyticModel, Program
from tuner.models.scale_out import Predict, ScaleOut
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import Precision, TrainingJob

#: Micro-batches of a step.
MANY = 1000
#: (width, blocks, heads, positions) of the models that are blocks of GPT-2's form.
GPT2_FORM = {
    "gpt2": (768, 12, 12, 1024),
    "large": (1024, 24, 16, 512),
    "opt-1p3b": (2048, 24, 32, 2048),
}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
_NAME = re.compile(r"\w+?model_([\w.-]+?)_p(\w+)_b(\d+)_s(\d+)_.*freq(\d+)_")
#: A pass waits for its host if it takes at most this multiple of the shortest of its model.
WAITS = 1.25


@dataclass
class Workload:
    """One forward pass.

    Attributes:
        key: (model, precision, batch, sequence length).
        energy_J, time_s: measured, by clock (MHz).
        estimated_J: by EnergAIzer, by clock; empty where it publishes none.
    """

    key: tuple[str, Precision, int, int]
    energy_J: dict[int, float] = field(default_factory=dict)
    time_s: dict[int, float] = field(default_factory=dict)
    estimated_J: dict[int, float] = field(default_factory=dict)

    def steps_off(self, energy_J: dict[int, float]) -> int:
        """Return how many clocks lie between the least energy measured and that of `energy_J`."""
        clocks = sorted(self.energy_J)
        places = [
            clocks.index(min(each, key=each.__getitem__)) for each in (self.energy_J, energy_J)
        ]
        return abs(places[0] - places[1])


def read_workloads() -> list[Workload]:
    """Return the workloads with their measurements and EnergAIzer's estimates."""
    found = _read("energaizer_measured.csv")
    with (DATA / "energaizer_estimated.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            key = (row["config"], row["prec"], int(row["batch"]), int(row["seq"]))
            found[key].estimated_J[int(row["freq"])] = float(row["gee_energy"])
    return [found[key] for key in sorted(found)]


def _read(name: str) -> dict[tuple[Any, ...], Workload]:
    """Return the measured passes of a file over tokens, by key."""
    found: dict[tuple[Any, ...], Workload] = {}
    with (DATA / name).open(newline="") as file:
        for row in csv.DictReader(file):
            match = _NAME.match(row["workload"])
            if match is None:  # a model of images
                continue
            model, precision, batch, length, clock = match.groups()
            key: Any = (model, precision, int(batch), int(length))
            workload = found.setdefault(key, Workload(key))
            workload.energy_J[int(clock)] = float(row["energy"])
            workload.time_s[int(clock)] = float(row["time"]) / 1e3
    return found


def power_waiting_errors() -> dict[tuple[Any, ...], float]:
    """Return predicted over measured watts, less one, of the passes at 900 MHz that wait.

    No constant was set by these rows, and their time says that they wait, not the models: more
    tokens would take no longer.
    """
    passes = _read("energaizer_900_MHz.csv")
    least: dict[tuple[Any, ...], float] = {}
    for key, each in passes.items():
        least[key[:2]] = min(least.get(key[:2], np.inf), each.time_s[900])
    return {
        key: predicted(each)[1][900] * each.time_s[900] / each.energy_J[900] - 1
        for key, each in passes.items()
        if each.time_s[900] <= WAITS * least[key[:2]]
    }


@lru_cache(maxsize=1)
def _cluster() -> Cluster:
    """One A100 of 40 GB on PCIe: a 250 W board; 45 W idle, as the artifact measures."""
    nvlink = load_cluster("a100-40gb-8")
    device = replace(nvlink.device, max_W=250.0, idle_W=45.0)
    return replace(nvlink, device=device, nodes=1, devices_per_node=1)


def predictor(workload: Workload, clocks: Sequence[int]) -> Predict:
    """Return the log seconds and watts of a step of `MANY` micro-batches at some clocks."""
    name, precision, batch, length = workload.key
    if name in GPT2_FORM:
        width, blocks, heads, positions = GPT2_FORM[name]
        model = gpt2(width, blocks, heads, positions=positions, vocabulary=8)
    else:
        model = {**QWEN2, "vocab_size": 8}
    job = TrainingJob(
        name="pass",
        model=model,
        sequence_length=length,
        global_batch=batch * MANY,
        steps=1,
        precision=precision,
    )
    program = Program(fused_attention=False)
    configurations = [Configuration.of(micro_batch=batch, clock_MHz=clock) for clock in clocks]

    def predict(constants: Constants) -> np.ndarray:
        model = AnalyticModel(job, _cluster(), constants=constants, program=program)
        figures = model.predict(configurations)
        return np.log(np.column_stack([figures.step_time_s, figures.power_W]))

    return predict


def predicted(workload: Workload) -> tuple[dict[int, float], dict[int, float]]:
    """Return joules and watts of a pass by clock (MHz), by the models as they ship."""
    clocks = sorted(workload.energy_J)
    step_s, watts = np.exp(predictor(workload, clocks)(constants_of(_cluster().device))).T
    joules = watts * step_s / MANY / 3
    return dict(zip(clocks, joules, strict=True)), dict(zip(clocks, watts, strict=True))


def after_one_J(workload: Workload) -> dict[int, float]:
    """Return joules of a pass by clock, by models that its highest clock's launch corrected."""
    clocks = sorted(workload.energy_J)
    top = clocks[-1]
    seconds = workload.time_s[top]
    model = ScaleOut(
        constants_of(_cluster().device),
        predictor(workload, [top]),
        gpus=[1],
        launches=["first"],
        measured=np.log([[seconds * MANY * 3, workload.energy_J[top] / seconds]]),
    )
    logs = model.medians(predictor(workload, clocks), [1] * len(clocks))
    return dict(zip(clocks, np.exp(logs.sum(axis=1)) / MANY / 3, strict=True))


def compare() -> tuple[list[str], list[Figure]]:
    """Return the table of workloads, and the figures."""
    rows, off, lost, theirs, ours, power, after = [], [], [], [], [], [], []
    for workload in read_workloads():
        joules, watts = predicted(workload)
        off.append(workload.steps_off(joules))
        after.append(workload.steps_off(after_one_J(workload)) <= 1)
        least, chosen = (min(each, key=each.__getitem__) for each in (workload.energy_J, joules))
        lost.append(workload.energy_J[chosen] / workload.energy_J[least] - 1)
        for clock, joule in workload.energy_J.items():
            power.append(abs(watts[clock] * workload.time_s[clock] / joule - 1))
        if workload.estimated_J:
            ours.append(off[-1] <= 1)
            theirs.append(workload.steps_off(workload.estimated_J) <= 1)
        name, precision, batch, length = workload.key
        rows.append((name, precision, batch, length, least, chosen, f"{lost[-1]:.1%}"))
    waiting = list(power_waiting_errors().values())
    heads = ("forward pass", "", "batch", "tokens", "least energy at", "predicted at", "costs")
    within = sum(each <= 1 for each in off)
    return table(heads, rows), [
        Figure("energaizer_clock_within_a_step", within, f"of {len(off)}"),
        Figure("energaizer_clock_one_launch", sum(after), f"of {len(after)}"),
        Figure("energaizer_clock_costs_mean", 100 * float(np.mean(lost)), "%"),
        Figure("energaizer_power_median", 100 * float(np.median(power)), "%"),
        Figure("power_waiting_error", 100 * float(np.median(np.abs(waiting))), "%"),
        Figure("power_waiting_bias", 100 * float(np.mean(waiting)), "%"),
        Figure("energaizer_six_within_a_step", sum(ours), f"of {len(ours)}"),
        Figure("energaizer_six_by_its_own_estimate", sum(theirs), f"of {len(theirs)}"),
    ]

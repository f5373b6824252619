"""TFLOP/s, power, time and energy of 7B, 32B and 72B multimodal training on GH200 (JUPITER).

The study states neither the work of a run nor every batch size, so missing values are assumed
(`ASSUMED`), and a run's work is taken from its study's baseline row. Directions (the better of two
runs) are compared for every pair of one study and one model that both state a figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure
from benchmarks.validation.comparison import Comparison, quantiles, rows_of, table
from tuner.models.analytic.constants import Constants, constants_of
from tuner.models.analytic.model import AnalyticModel
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.search_spaces.model_facts import facts_of

ASSUMED = (
    "assumed: ZeRO-3 (or the stage named), sequences of 12,288 tokens, all blocks recomputed, the "
    "language backbone alone (no vision encoder), micro-batch = local batch of 4, 2, 1 sequences",
    "assumed: offloading doubles the local batch, sequence parallelism multiplies it by its degree",
    "assumed: the published TFLOP/s count recomputation (without it 503 TFLOP/s at 469 W would be "
    "670 TFLOP/s of arithmetic: above what the die reaches at that power), and the whole square of "
    "attention's scores, of which the fused kernel executes half",
    "assumed: a run's work is its baseline's TFLOP/s x time x GPUs; power is per superchip",
    "calibrated on three rows of this table (A1, A5 and A9's TFLOP/s and GPU power) and on A12 "
    "over A9 (how far ZeRO-3's traffic hides): those are no test",
)
LOCAL = {"7B": 4, "32B": 2, "72B": 1}
COLUMNS = (
    "tflops_per_gpu",
    "gpu_power_W",
    "module_power_W",
    "wall_time_min",
    "energy_kJ",
    "efficiency_tflop_per_kJ",
)
#: Superchips of a node. Table I's TFLOP/kJ is the TFLOP/s of one superchip over the power of a
#: node: 7B's 428.2 TFLOP/s over 4 x 635 W is its 168.7, 72B's 476.0 over 4 x 564 W its 211.3.
A_NODE = 4
#: Less is no direction (the three studies' own baselines differ by up to 3 %).
SAME = 0.01


@dataclass(frozen=True)
class Run:
    """One row: what is published and what is predicted, by column."""

    study: str
    model: str
    label: str
    published: dict[str, float]
    predicted: dict[str, float]
    sequence_on_fixed: bool = False  # sequence parallelism on as many GPUs as its baseline

    @property
    def name(self) -> str:
        return f"{self.study} {self.model} {self.label}"


def _number(text: str) -> float | None:
    return float(text) if text else None


def _published(row: dict[str, str]) -> dict[str, float]:
    values = {name: _number(row[name]) for name in COLUMNS if name != "energy_kJ"}
    values["energy_kJ"] = _number(row["energy_total_kJ"])
    node = _number(row["energy_node_kJ"])
    if values["energy_kJ"] is None and node is not None:
        values["energy_kJ"] = node * int(row["n_gpus"]) / 4
    return {name: value for name, value in values.items() if value is not None}


def predict_row(row: dict[str, str], constants: Constants | None = None) -> dict[str, float]:
    """TFLOP/s and watts a superchip."""
    n, u, stage = int(row["n_gpus"]), int(row["sp"]), int(row["zero_stage"] or 3)
    offloads = row["technique"].endswith("_offload")
    local = LOCAL[row["model"]] * u * (2 if offloads else 1)
    if row["study"] == "zero_stage":
        local = 4 if stage == 3 else 2
    job = load_job(f"lmm-{row['model'].lower()}")
    # The language model alone, which transformers has no class for.
    text = {**job.model["text_config"], "model_type": "qwen2"}
    job = replace(job, global_batch=local * n // u, model=text, frames=0)
    mode = row["mode"] if offloads else "none"
    asynchronous = {"sync": "cpu", "async": "async", "none": "none"}[mode]
    configuration = Configuration.of(
        data_parallel=n // u,
        sequence_parallel=u,
        micro_batch=local,
        zero_stage=stage,
        activation_checkpointing="full",
        optimizer_offload=asynchronous if row["technique"] == "optimizer_offload" else "none",
        activation_offload=mode if row["technique"] == "activation_offload" else "none",
    )
    cluster = replace(load_cluster("jupiter-32"), nodes=max(1, n // 4))
    bare = replace(cluster, host_W=0.0, supply_loss=0.0)
    said = AnalyticModel(job, cluster, constants=constants).predict([configuration])
    gpu = AnalyticModel(job, bare, constants=constants).predict([configuration])
    facts = facts_of(job)
    forward = facts.forward_flops(job.global_batch, job.sequence_length)
    head = 2.0 * facts.head_parameters * job.global_batch * job.sequence_length
    seconds = float(said.step_time_s[0])
    return {
        "tflops_per_gpu": (4 * forward - head) / seconds / n / 1e12,
        "gpu_power_W": float(gpu.power_W[0]) / n,
        "module_power_W": float(said.power_W[0]) / n,
        "efficiency_tflop_per_kJ": (4 * forward - head)
        / seconds
        / 1e9
        / A_NODE
        / float(said.power_W[0]),
    }


def _runs(path: Path) -> list[Run]:
    runs: list[Run] = []
    work: dict[tuple[str, str], float] = {}
    for row in rows_of(path):
        published, predicted = _published(row), predict_row(row)
        n, key = int(row["n_gpus"]), (row["study"], row["model"])
        if "wall_time_min" in published and "tflops_per_gpu" in published:
            done = published["tflops_per_gpu"] * published["wall_time_min"] * 60 * n
            work.setdefault(key, done)
        elif row["study"] == "zero_stage" and key not in work:
            # Neither TFLOP/s nor one wall time is stated: its first row's energy sets the work.
            seconds = published["energy_kJ"] * 1e3 / (predicted["module_power_W"] * n)
            work[key] = predicted["tflops_per_gpu"] * seconds * n
            published = {}
        if key in work:
            seconds = work[key] / (predicted["tflops_per_gpu"] * n)
            predicted["wall_time_min"] = seconds / 60
            predicted["energy_kJ"] = predicted["module_power_W"] * n * seconds / 1e3
        fixed = int(row["sp"]) > 1 and row["gpus_kind"] == "fixed"
        runs.append(Run(row["study"], row["model"], row["label"], published, predicted, fixed))
    return runs


def fit(path: Path) -> Constants:
    """The constants of JUPITER's GH200 by the four rows that `ASSUMED` names, and no other.

    The median of the baselines' TFLOP/s sets `matrix_efficiency`, their mean power `compute_W`, and
    the gain of A12 over A9 `reduce_efficiency`: three figures for three constants.
    """
    from scipy.optimize import least_squares

    rows = {row["label"]: row for row in rows_of(path) if row["study"] == "optimizer_offload"}
    names = ("matrix_efficiency", "compute_W", "reduce_efficiency")
    base = constants_of(load_cluster("jupiter-32").device)

    def constants(x: np.ndarray) -> Constants:
        return replace(base, **dict(zip(names, np.exp(x).tolist(), strict=True)))

    def residual(x: np.ndarray) -> list[float]:
        off = {}
        for label in ("A1", "A5", "A9", "A12"):
            predicted, published = predict_row(rows[label], constants(x)), _published(rows[label])
            off[label] = [
                float(np.log(predicted[column] / published[column])) for column in COLUMNS[:2]
            ]
        baselines = np.array([off[label] for label in ("A1", "A5", "A9")])
        gain = off["A12"][0] - off["A9"][0]
        return [float(np.median(baselines[:, 0])), float(baselines[:, 1].mean()), gain]

    start = np.log([getattr(base, name) for name in names])
    return constants(least_squares(residual, start, diff_step=1e-3).x)


def _directions(runs: list[Run]) -> Iterator[tuple[str, Run, Run, bool]]:
    """(column, run, run, right) of every pair that states a difference."""
    for a, b in combinations(runs, 2):
        if (a.study, a.model) != (b.study, b.model):
            continue
        for column in COLUMNS:
            if not all(column in part for part in (a.published, b.published, a.predicted)):
                continue
            ratio = b.published[column] / a.published[column]
            if abs(ratio - 1) > SAME:
                said = b.predicted[column] / a.predicted[column]
                yield column, a, b, (ratio > 1) == (said > 1)


def _energy_against_efficiency(runs: list[Run]) -> tuple[int, set[tuple[str, str]]]:
    """Pairs that state energy and efficiency, and those whose two cannot both be right: for the
    same work less energy is more TFLOP/kJ."""
    pairs, against = 0, set()
    for a, b in combinations(runs, 2):
        if (a.study, a.model) != (b.study, b.model):
            continue
        if not all({"energy_kJ", COLUMNS[-1]} <= set(run.published) for run in (a, b)):
            continue
        energy, efficiency = (
            b.published[column] / a.published[column] - 1 for column in ("energy_kJ", COLUMNS[-1])
        )
        if min(abs(energy), abs(efficiency)) > SAME:
            pairs += 1
            if (energy > 0) == (efficiency > 0):
                against.add((a.name, b.name))
    return pairs, against


@dataclass(frozen=True)
class Directions:
    """Directions of pairs of runs that the models get right: (column, right) of each pair.

    Attributes:
        contradictory: pairs whose published energy and efficiency cannot both be right.
        unidentifiable: of the others, those with sequence parallelism on as many GPUs as its
            baseline, because the study does not state what these runs hold equal.
        identifiable: the rest.
    """

    contradictory: Sequence[tuple[str, bool]]
    unidentifiable: Sequence[tuple[str, bool]]
    identifiable: Sequence[tuple[str, bool]]

    @classmethod
    def of(cls, runs: list[Run]) -> Directions:
        """Compare every pair of runs."""
        _, against = _energy_against_efficiency(runs)
        groups: tuple[list[tuple[str, bool]], ...] = ([], [], [])
        for column, a, b, right in _directions(runs):
            if column in ("energy_kJ", COLUMNS[-1]) and (a.name, b.name) in against:
                group = 0
            else:
                group = 1 if a.sequence_on_fixed or b.sequence_on_fixed else 2
            groups[group].append((column, right))
        return cls(*groups)

    @property
    def all(self) -> list[tuple[str, bool]]:
        return [*self.contradictory, *self.unidentifiable, *self.identifiable]

    @property
    def lines(self) -> list[str]:
        """How many directions are right, in all and apart."""
        rows = []
        for column in (*COLUMNS, "all"):
            row = [column]
            for group in (self.all, self.identifiable, self.unidentifiable, self.contradictory):
                judged = [right for name, right in group if column in (name, "all")]
                row.append(f"{sum(judged)} of {len(judged)}" if judged else "")
            rows.append(row)
        heads = ("directions right", "all", "identifiable", "not identifiable", "contradictory")
        return [
            *table(heads, rows),
            "not identifiable: pairs with sequence parallelism on as many GPUs as its baseline, "
            "because what these runs hold equal is not stated; contradictory: pairs whose "
            "published energy and efficiency cannot both be right; a coin gets half",
        ]

    @property
    def figures(self) -> list[Figure]:
        figures = []
        for column in COLUMNS:
            judged = [right for name, right in self.all if name == column]
            if judged:
                figures.append(Figure(f"jupiter_{column}_directions", _share(judged), "ratio"))
        for name, group in (
            ("directions", self.all),
            ("sound_directions", [*self.unidentifiable, *self.identifiable]),
            ("identifiable_directions", self.identifiable),
            ("unidentifiable_directions", self.unidentifiable),
            ("contradictory_directions", self.contradictory),
        ):
            figures += [
                Figure(f"jupiter_{name}", _share([right for _, right in group]), "ratio"),
                Figure(f"jupiter_{name}_pairs", len(group), "count"),
            ]
        return figures


def _share(judged: Sequence[bool]) -> float:
    return sum(judged) / len(judged)


def _parts(runs: list[Run], column: str) -> tuple[float, float]:
    """Standard deviations of the log error that the runs of one model share, and of a run's own.

    One-way random effects by the method of moments with groups of unequal size (Searle, Casella
    and McCulloch 1992, "Variance Components", section 3.6).
    """
    groups: dict[str, list[float]] = {}
    for run in runs:
        if column in run.published and column in run.predicted:
            error = float(np.log(run.published[column] / run.predicted[column]))
            groups.setdefault(run.model, []).append(error)
    size = np.array([len(errors) for errors in groups.values()], dtype=float)
    mean = np.array([np.mean(errors) for errors in groups.values()])
    whole = np.concatenate([np.array(errors) for errors in groups.values()])
    within = sum(len(e) * float(np.var(e)) for e in groups.values()) / (len(whole) - len(size))
    between = float(size @ (mean - whole.mean()) ** 2) / (len(size) - 1)
    each = (size.sum() - (size**2).sum() / size.sum()) / (len(size) - 1)
    return float(np.sqrt(max(0.0, (between - within) / each))), float(np.sqrt(within))


def compare(csv_file: Path, *, refit: bool = False) -> Comparison:
    """The comparison; `refit` prints the constants that the rows of `ASSUMED` give."""
    runs = _runs(csv_file)
    heads = ["run"]
    for column in COLUMNS:
        heads += [column.replace("_per_gpu", ""), "predicted"]
    rows = []
    errors: dict[str, list[float]] = {column: [] for column in COLUMNS}
    for run in runs:
        row: list[str] = [run.name]
        for column in COLUMNS:
            published, said = run.published.get(column), run.predicted.get(column)
            row += [
                f"{published:,.4g}" if published else "",
                f"{said:,.4g}" if said and published else "",
            ]
            if published and said:
                errors[column].append(said / published - 1)
        rows.append(row)
    directions = Directions.of(runs)
    lines = [*ASSUMED, "", *table(heads, rows), "", *directions.lines]
    figures = []
    for column in COLUMNS:
        if errors[column]:
            median, _, worst = quantiles(errors[column])
            figures += [
                Figure(f"jupiter_{column}_median_error", 100 * median, "%"),
                Figure(f"jupiter_{column}_worst_error", 100 * worst, "%"),
            ]
    figures += directions.figures
    for column, name in (("tflops_per_gpu", "time"), ("gpu_power_W", "power")):
        shared, own = _parts(runs, column)
        figures += [
            Figure(f"jupiter_{name}_error_shared", shared, "sd of log"),
            Figure(f"jupiter_{name}_error_own", own, "sd of log"),
        ]
    wrong = [f"{a.name} to {b.label} ({c})" for c, a, b, right in _directions(runs) if not right]
    lines += ["wrong: " + "; ".join(wrong)] if wrong else []
    lines += [
        "why: with the tokens a GPU takes held equal, sequence parallelism only adds all-to-all in "
        "the models, while the study reports up to 16 % less energy at degree 2: what its "
        "fixed-GPU runs hold equal is not stated; activation offload changes nothing in the "
        "models but the batch; a GPU's power falls with the model's size in the study (490, 456, "
        "406 W) and hardly in the models, so 7B comes out low and 72B high; 7B's TFLOP/s come out "
        "high, because attention is a larger share of its counted FLOPs than of 32B's and 72B's, "
        "half of which the fused kernel skips: the study does not state what it counts",
    ]
    if refit:
        found = fit(csv_file)
        lines.append(
            f"fitted: matrix_efficiency = {found.matrix_efficiency:.3g}, compute_W = "
            f"{found.compute_W:.3g} (GH200-96GB), reduce_efficiency = {found.reduce_efficiency:.3g}"
        )
    right = {
        name: sum(r for _, r in group)
        for name, group in (("all", directions.all), ("rest", directions.identifiable))
    }
    return Comparison(
        "jupiter",
        "multimodal training on GH200 (JUPITER)",
        lines,
        figures,
        summary=f"energy of a run: median error {100 * quantiles(errors['energy_kJ'])[0]:.1f} %. "
        f"The better of two runs: {right['all']} of {len(directions.all)} directions right; "
        f"{right['rest']} of {len(directions.identifiable)} without pairs that contradict "
        "themselves or that cannot be identified",
    )

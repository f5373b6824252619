"""Recorded tables over clocks and limits: three settings fitted, the rest predicted.

`zeus-nsdi23`: one GPU, one curve per workload and batch size over power limits. `perseus-a100`:
five large models in four pipeline stages, over one limit for all, and over plans whose mean clock
is known. The fitted settings are the lowest, the middle and the highest; the parameters that belong
to the device are fitted to these alone.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure
from benchmarks.validation.clock_fit import Curve, DeviceCurve, Setting, fit_curve, fit_device
from benchmarks.validation.comparison import Comparison, quantiles, table

#: Idle power of the recorded devices, watts: V100 from its own table's least, the others' data.
IDLE_W = {"V100 (1 GPU)": 38.0, "Quadro RTX6000 (1 GPU)": 20.0, "A100-80GB-PCIe x4": 200.0}
#: Energy over time at one power: what a split into fitted and held-out settings needs at least.
LEAST_SETTINGS = 4


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _split(settings: Sequence[Setting]) -> tuple[list[Setting], list[Setting]]:
    """(the lowest, the middle and the highest setting; the rest)."""
    ordered = sorted(settings, key=lambda s: s.clock if s.clock is not None else s.limit_W or 0.0)
    chosen = {0, len(ordered) // 2, len(ordered) - 1}
    return (
        [setting for i, setting in enumerate(ordered) if i in chosen],
        [setting for i, setting in enumerate(ordered) if i not in chosen],
    )


def _said(curve: Curve, setting: Setting) -> tuple[float, float]:
    if setting.clock is not None:
        seconds, watts = curve.predict(clock=np.array([setting.clock]))
    else:
        seconds, watts = curve.predict(limit_W=np.array([setting.limit_W]))
    return float(seconds[0]), float(watts[0])


class _Held:
    """Held-out errors of energy, time and power."""

    def __init__(self) -> None:
        self.energy: list[float] = []
        self.time: list[float] = []
        self.power: list[float] = []

    def add(self, curve: Curve, settings: Sequence[Setting]) -> None:
        for setting in settings:
            seconds, watts = _said(curve, setting)
            true = setting.time_s * setting.power_W
            self.energy.append(seconds * watts / true - 1)
            self.time.append(seconds / setting.time_s - 1)
            self.power.append(watts / setting.power_W - 1)

    def row(self, name: str) -> list[str]:
        cells = [name, str(len(self.energy))]
        for errors in (self.energy, self.time, self.power):
            cells += [f"{100 * error:.1f} %" for error in quantiles(errors)]
        return cells


HEADS = (
    "what",
    "held out",
    *(
        f"{what} {how}"
        for what in ("energy", "time", "power")
        for how in ("median", "p90", "worst")
    ),
)


def _fit_all(
    groups: Mapping[str, Sequence[Setting]], idle_W: float, *, every: int = 1
) -> tuple[DeviceCurve, dict[str, tuple[Curve, list[Setting]]]]:
    """The device and each group's curve with what it did not see."""
    split = {name: _split(settings) for name, settings in groups.items()}
    device = fit_device([fitted for fitted, _ in list(split.values())[::every]], idle_W=idle_W)
    return device, {
        name: (fit_curve(device, fitted)[0], held) for name, (fitted, held) in split.items()
    }


def compare_zeus(shared: Path) -> Comparison:
    rows = _read(shared / "traces" / "zeus-nsdi23" / "table.csv")
    kinds: dict[str, dict[str, list[Setting]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        kinds[row["hardware"]][f"{row['workload']} batch {row['batch_size']}"].append(
            Setting(
                float(row["step_time_s"]),
                float(row["avg_power_W"]),
                limit_W=float(row["power_limit_W"]),
            )
        )
    overall, lines = _Held(), []
    for kind, groups in kinds.items():
        groups = {n: s for n, s in groups.items() if len(s) >= LEAST_SETTINGS}
        _, curves = _fit_all(groups, IDLE_W[kind], every=5)
        held = _Held()
        for curve, rest in curves.values():
            held.add(curve, rest)
            overall.add(curve, rest)
        lines.append(held.row(kind))
    noise = _noise(kinds)
    text = table(HEADS, [*lines, overall.row("all")])
    text += [
        "fitted: the lowest, the middle and the highest power limit of each workload and batch "
        "size; what a device's curves share, by every fifth of them, those settings alone",
        f"noise: where no limit binds (power within 5 % over all limits), time alone spreads by "
        f"{100 * noise:.1f} % (median of worst over mean), measured once each",
    ]
    median, p90, worst = quantiles(overall.energy)
    if median > 0.03 or p90 > 0.08:
        text.append(
            "short of 3 % median and 8 % at the 90th percentile: limits near the device's least "
            "slow it by more than the clock alone says, and workloads with phases of different "
            "power turn from the limit to their own level differently; a step of two phases of "
            "different power was tried once: nearer on V100 (2.5 and 6.8 %) and on perseus-a100 "
            "(2.6 and 6.1 %), farther on RTX 6000 (3.0 and 12.3 %), and the three fitted settings "
            "do not tell which of the two a device wants, so it is not in the models"
        )
    return Comparison(
        "zeus",
        "power limits on V100 and RTX 6000 (zeus-nsdi23), three settings fitted",
        text,
        [
            Figure("zeus_energy_median_error", 100 * median, "%"),
            Figure("zeus_energy_p90_error", 100 * p90, "%"),
            Figure("zeus_energy_worst_error", 100 * worst, "%"),
        ],
        summary=f"energy at limits between three fitted ones: median {100 * median:.1f} %, 90th "
        f"percentile {100 * p90:.1f} %; interpolation along one curve, not another configuration",
    )


def _noise(kinds: Mapping[str, Mapping[str, Sequence[Setting]]]) -> float:
    """Spread of time where no limit acts: worst distance from the mean, median over curves."""
    spreads = []
    for groups in kinds.values():
        for settings in groups.values():
            power = np.array([setting.power_W for setting in settings])
            if len(power) >= LEAST_SETTINGS and np.ptp(power) < 0.05 * power.mean():
                time = np.array([setting.time_s for setting in settings])
                spreads.append(float(np.abs(time / time.mean() - 1).max()))
    return float(np.median(spreads)) if spreads else 0.0


TOP_MHZ = 1410.0


def _mean_clock(row: dict[str, str]) -> float:
    return float(np.mean([float(x) for x in row["power_state_mean_per_rank"].split(";")]))


def compare_perseus(shared: Path) -> Comparison:
    rows = _read(shared / "traces" / "perseus-a100" / "table.csv")
    limits: dict[str, dict[float, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    plans: dict[str, list[Setting]] = defaultdict(list)
    envpipe: dict[str, dict[str, str]] = {}
    for row in rows:
        seen = float(row["step_time_s"]), float(row["avg_power_W"])
        if row["method"] == "zeus_global":
            limits[row["workload"]][float(row["power_limit_W"])].append(seen)
        elif row["method"] == "perseus":
            plans[row["workload"]].append(Setting(*seen, clock=_mean_clock(row) / TOP_MHZ))
        elif row["method"] == "envpipe":
            envpipe[row["workload"]] = row  # the last plan is the one that slows stages
    global_limits = {
        workload: [
            # Four devices under one limit each: the job's power over four times the limit.
            Setting(float(np.mean(seconds)), float(np.mean(watts)), limit_W=4 * limit)
            for limit, (seconds, watts) in (
                (limit, tuple(zip(*seen, strict=True))) for limit, seen in by_limit.items()
            )
        ]
        for workload, by_limit in limits.items()
    }
    idle = IDLE_W["A100-80GB-PCIe x4"]
    lines, figures, said = [], [], []
    curves: dict[str, Curve] = {}
    for name, groups in (("limits", global_limits), ("plans by mean clock", plans)):
        _, fitted = _fit_all(groups, idle)
        held = _Held()
        for workload, (curve, rest) in fitted.items():
            held.add(curve, rest)
            if name != "limits":
                curves[workload] = curve
        lines.append(held.row(name))
        median, p90, worst = quantiles(held.energy)
        said.append(f"{name} {100 * median:.1f} and {100 * p90:.1f} %")
        stem = f"perseus_{name.split()[0]}_energy"
        figures += [
            Figure(f"{stem}_median_error", 100 * median, "%"),
            Figure(f"{stem}_p90_error", 100 * p90, "%"),
            Figure(f"{stem}_worst_error", 100 * worst, "%"),
        ]
    text, saved = _slack(curves, envpipe, plans)
    return Comparison(
        "perseus",
        "limits and plans of five models on A100 (perseus-a100), three settings fitted",
        [
            *table(HEADS, lines),
            "plans: 30 to 38 a model, each reduced to the mean clock of its ranks and instructions",
            "",
            *text,
        ],
        [*figures, *saved],
        summary="energy of settings between three fitted ones: median, 90th percentile of "
        + "; ".join(said)
        + "; interpolation along one curve of one model, not another configuration",
    )


#: Blocks and the head of the transformers among them: (hidden, vocabulary, blocks in each stage,
#: with the last stage's head apart), from the recorded partitions (embedding first, head last; GPT
#: has a norm before its head) and the models' public configurations.
STAGES = {
    "bert-huge-uncased mbs8x32": (1280, 30522, (7, 6, 6, 5)),
    "gpt3-xl mbs8x128": (2048, 50257, (7, 6, 7, 4)),
    "bloom-3b mbs4x128": (2560, 250880, (9, 8, 8, 5)),
}


def _slack(
    curves: Mapping[str, Curve],
    envpipe: Mapping[str, dict[str, str]],
    plans: Mapping[str, Sequence[Setting]],
) -> tuple[list[str], list[Figure]]:
    """Clocks by stage from the models' slack, against the recorded EnvPipe plans.

    A stage's work is its blocks, the head counted as V / 12 h of them (2 V h against 24 h^2 FLOPs a
    token); each stage runs at the least energy that keeps its slot within the slowest stage's.
    """
    rows, reached = [], []
    for workload, (hidden, vocabulary, blocks) in STAGES.items():
        curve, row = curves[workload], envpipe[workload]
        work = np.array(blocks, dtype=float)
        work[-1] += vocabulary / (12 * hidden)
        full = max(plans[workload], key=lambda setting: setting.clock or 0.0)
        full_J = full.time_s * full.power_W
        # No clock below those that the plans ran at: the curve says nothing there.
        grid = np.linspace(min(s.clock or 1.0 for s in plans[workload]), 1.0, 161)
        seconds, watts = curve.predict(clock=grid)
        slower = seconds / seconds[-1]
        chosen, said_W = [], 0.0
        for here in work:
            fits = here * slower <= work.max() + 1e-9
            # The step's length is the slowest stage's, so at a fixed time least power is best.
            best = int(np.flatnonzero(fits)[watts[fits].argmin()])
            chosen.append(grid[best])
            said_W += float(watts[best]) / len(work)
        recorded = [float(c) / TOP_MHZ for c in row["power_state_mean_per_rank"].split(";")]
        same_W = float(np.mean(curve.predict(clock=np.array(recorded))[1]))
        top_W = float(watts[-1])
        true = 1 - float(row["energy_J"]) / full_J
        mine, theirs = 1 - said_W / top_W, 1 - same_W / top_W
        reached.append(mine >= true)
        rows.append(
            (
                workload,
                ", ".join(f"{TOP_MHZ * c:.0f}" for c in recorded),
                f"{100 * true:.1f} %",
                f"{100 * theirs:.1f} %",
                ", ".join(f"{TOP_MHZ * c:.0f}" for c in chosen),
                f"{100 * mine:.1f} %",
            )
        )
    heads = ("model", "EnvPipe's clocks", "saved", "predicted", "clocks by slack", "predicted")
    lines = [
        *table(heads, rows),
        "a prediction against a measurement: what the clocks by slack would really save and cost "
        "in time was not run; T5 and Wide-ResNet are left out (their stages' work does not follow "
        "from a block's size); the predictions for EnvPipe's own clocks show how far they flatter",
    ]
    return lines, [Figure("perseus_slack_reaches_envpipe", sum(reached) / len(reached), "ratio")]

"""Coverage of the surrogates' 90 % intervals for held-out measurements.

Recorded tables and simulated clusters. Of each search problem some points are drawn as the
measurements, at several sizes; the others are predicted, and an interval holds if the measured
figure lies within it (including the fitted noise of one window, because it is compared with one
window). A cluster's measurements are grouped as probes are: a launch with a few live settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure
from benchmarks.validation.comparison import quantiles, table
from tuner.models.analytic.model import AnalyticModel
from tuner.models.simulated import Conditions, SimulatedRunner
from tuner.models.surrogate.features import FeatureMap
from tuner.models.surrogate.surrogates import FEW, Surrogates
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import load_space
from tuner.workload.measure.statistics import Z90
from tuner.workload.probe import ProbeRequest
from tuner.workload.table import load_table

#: Measurements that the surrogates are fitted to.
SIZES = (8, 16, 32, 64)
#: What the intervals are of.
WHAT = ("time", "power", "energy")
#: Held-out points a fit is judged by, at most.
JUDGED = 200
#: Job and cluster of the simulated problems, and how far the clusters are from the models.
SIMULATED = (("qwen2.5-7b", "h100-32"), ("opt-350m", "a100-40gb-8"))
MODEL_ERROR = 0.08


@dataclass(frozen=True)
class Seen:
    """One search problem's measurements; arrays over its configurations.

    Attributes:
        name: of the problem.
        candidates: every configuration that was measured.
        logs: log step time and log power, (n, 2).
        errors: stated relative standard errors of both, (n, 2); NaN where unknown.
        launches: which launch each belongs to, (n,).
        prior: whether the analytic models are the mean.
    """

    name: str
    candidates: Candidates
    logs: np.ndarray
    errors: np.ndarray
    launches: np.ndarray
    prior: AnalyticModel | None = None


def _recorded(folder: Path) -> Iterator[Seen]:
    recorded = load_table(folder)
    for group in recorded.groups:
        points = group.points
        candidates = Candidates.from_configurations(p.configuration for p in points)
        by_configuration = {p.configuration: p for p in points}
        ordered = [by_configuration[each] for each in candidates.configurations]
        keys = [point.configuration.launch.key for point in ordered]
        yield Seen(
            f"{recorded.name}: {group.name}",
            candidates,
            np.log([[point.time_s, point.power_W] for point in ordered]),
            np.full((len(ordered), 2), np.nan),
            np.unique(keys, return_inverse=True)[1],
        )


def _simulated(job_name: str, cluster_name: str, *, launches: int, seed: int) -> Seen:
    """A cluster that departs from the models, a few clocks of launches drawn at random."""
    rng = np.random.default_rng(seed)
    job, cluster = load_job(job_name), load_cluster(cluster_name)
    conditions = Conditions(model_error=MODEL_ERROR, power_noise=0.015)
    runner = SimulatedRunner(job, cluster, seed=seed, conditions=conditions)
    every = load_space("parallelism").candidates(job, cluster)
    model = AnalyticModel(job, cluster)
    configurations: list[Configuration] = []
    logs, errors = [], []
    number: list[int] = []
    drawn = rng.permutation(len(every.launches))
    for row in drawn:
        if len(set(number)) == launches:
            break
        launch = every.launches[int(row)]
        lives = [every.configurations[i].live for i in every.indices_of_launch(launch)]
        chosen = tuple(lives[int(i)] for i in rng.choice(len(lives), 4, replace=False))
        record = runner.run(ProbeRequest(f"p{row}", launch, chosen, time_limit_s=1e5))
        for m in record.measurements:
            configurations.append(Configuration(launch, m.live))
            logs.append([np.log(m.step_time_s), np.log(m.power_W)])
            errors.append([m.step_time_rse, m.power_rse])
            number.append(int(row))
    return Seen(
        f"simulated: {job_name} on {cluster_name}",
        Candidates.from_configurations(configurations),
        np.array(logs),
        np.array(errors),
        np.array(number),
        model,
    )


@dataclass(frozen=True)
class Held:
    """Held-out points of one fit.

    Attributes:
        size: measurements that were fitted.
        errors: signed log errors of time, power and energy, (n, 3).
        inside: whether each lies in its interval, (n, 3).
        narrow: standard deviations of log time and log power without the factor for few
            measurements, (n, 2).
        noise: noise variance of both, (n, 2).
    """

    size: int
    errors: np.ndarray
    inside: np.ndarray
    narrow: np.ndarray
    noise: np.ndarray

    def covered(self, output: int, few: float) -> np.ndarray:
        """Whether each would lie inside with another factor, (n,)."""
        wide = ((1 + few / self.size) * self.narrow[:, output]) ** 2 + self.noise[:, output]
        return np.asarray(np.abs(self.errors[:, output]) <= Z90 * np.sqrt(wide))


def held_out(seen: Seen, size: int, seed: int) -> Held:
    """Fit to `size` measurements drawn at random and predict the others.

    Rows of a simulated cluster are drawn launch by launch, as probes measure them.
    """
    rng = np.random.default_rng(seed)
    n = len(seen.logs)
    if seen.prior is None:
        order = rng.permutation(n)
    else:
        places = rng.permutation(np.unique(seen.launches))
        order = np.concatenate([np.flatnonzero(seen.launches == place) for place in places])
    known, rest = order[:size], order[size:]
    rest = rng.permutation(rest)[:JUDGED]
    configurations = seen.candidates.configurations
    surrogates = Surrogates(FeatureMap(seen.candidates, prior=seen.prior), seed=seed)
    surrogates.fit(
        [configurations[i] for i in known],
        *np.exp(seen.logs[known]).T,
        *(None if np.isnan(seen.errors).all() else seen.errors[known, k] for k in range(2)),
    )
    said = surrogates.with_intervals([configurations[i] for i in rest])
    noise = np.array(surrogates.noise()) ** 2 + np.nan_to_num(seen.errors[rest]) ** 2
    spread = np.column_stack([said.log_time_std, said.log_power_std])
    variance = spread**2 + noise
    together = 2 * said.correlation * np.sqrt(variance.prod(axis=1))
    variance = np.column_stack([variance, variance.sum(axis=1) + together])
    off = np.column_stack([said.log_time, said.log_power]) - seen.logs[rest]
    off = np.column_stack([off, off.sum(axis=1)])
    inside = np.abs(off) <= Z90 * np.sqrt(variance)
    return Held(size, off, inside, spread / (1 + np.array(FEW) / size), noise)


def _set_without(
    found: Mapping[str, Sequence[Held]], kind: str, output: int
) -> tuple[float, float]:
    """The factor that the other kinds give, and what it covers of this one."""

    def covers(which: str, few: float) -> float:
        return float(np.mean(np.concatenate([held.covered(output, few) for held in found[which]])))

    others = [other for other in found if other != kind]
    few = min(
        np.arange(0.0, 30.5, 0.5),
        key=lambda few: abs(np.mean([covers(other, few) for other in others]) - 0.9),
    )
    return float(few), covers(kind, float(few))


def compare(
    shared: Path, *, seeds: int = 2, sizes: Sequence[int] = SIZES, launches: int = 60
) -> tuple[list[str], list[Figure]]:
    """The table and the figures: coverage of what each kind of problem holds out."""
    problems = [
        seen
        for folder in ("zeus-nsdi23", "kareus-attention-a100", "perseus-a100")
        if (shared / "traces" / folder / "table.toml").exists()
        for seen in _recorded(shared / "traces" / folder)
    ]
    problems += [
        _simulated(*case, launches=launches, seed=number) for number, case in enumerate(SIMULATED)
    ]
    found: dict[tuple[str, int], list[Held]] = {}
    for seen in problems:
        kind = seen.name.partition(":")[0]
        for size in sizes:
            if len(seen.logs) < size + 8:
                continue
            for seed in range(seeds):
                found.setdefault((kind, size), []).append(held_out(seen, size, seed))
    rows, figures = [], []
    inside: dict[str, list[np.ndarray]] = {}
    heads = ["of", "fitted", "held out"]
    for what in WHAT:
        heads += [f"{what} off", "inside"]
    for (kind, size), every in found.items():
        errors = np.vstack([held.errors for held in every])
        held = np.vstack([held.inside for held in every])
        inside.setdefault(kind, []).append(held)
        medians = [f"{100 * quantiles(errors[:, k])[0]:.1f} %" for k in range(3)]
        shares = [f"{100 * held[:, k].mean():.0f} %" for k in range(3)]
        rows.append(
            (
                kind,
                size,
                len(held),
                *(x for pair in zip(medians, shares, strict=True) for x in pair),
            )
        )
    lines = table(heads, rows)
    by_kind: dict[str, list[Held]] = {}
    for (kind, _), every in found.items():
        by_kind.setdefault(kind, []).extend(every)
    for kind, parts in inside.items():
        held = np.vstack(parts)
        if len(by_kind) > 1:
            sets = [_set_without(by_kind, kind, output) for output in range(2)]
            lines.append(
                f"{kind}, with the factor for few measurements set on the other kinds alone: "
                + ", ".join(
                    f"{what} {100 * share:.0f} % (1 + {few:g} / n)"
                    for what, (few, share) in zip(WHAT, sets, strict=False)
                )
            )
        stem = f"coverage_{kind.replace('-', '_')}"
        figures += [
            Figure(f"{stem}_{what}", float(held[:, k].mean()), "ratio")
            for k, what in enumerate(WHAT)
        ]
    return lines, figures

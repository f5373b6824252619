"""The front predicted for more GPUs than were probed: what `tuner plan --run --gpus` answers.

The study probes the few GPUs at hand. Its windows correct the analytic models' constants
(`tuner.models.scale_out`), its peaks and failures correct predicted memory
(`tuner.models.memory_margin`), and the corrected models predict every configuration of the same
space on the larger cluster. Nothing of it is measured, and every point says so; intervals hold what
the probes left open, the network that none of them crossed included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.pareto import nondominated, probability_nondominated
from tuner.problem.constraints import Constraints
from tuner.results.choice import front_of
from tuner.results.judge import Judge
from tuner.results.parts import Choice, Interval, Point, with_probabilities
from tuner.results.predict import charged, corrected_models
from tuner.search_spaces.cluster import Cluster, enlarged
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.declared import CHANGED
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.rules import unrunnable
from tuner.search_spaces.space import Candidates, SearchSpace, default_configuration, load_space
from tuner.workload.probe import MeterInfo, ProbeRecord

if TYPE_CHECKING:
    from tuner.models.scale_out import Scaled
    from tuner.problem.problem import Problem

#: Configurations that are predicted with their derivatives: those nearest to the front. The others
#: lie so far behind that no draw brings them to it.
NEAR = 400
#: Joint draws behind the probability of being non-dominated.
DRAWS = 1000


@dataclass(frozen=True)
class Target:
    """Prediction for more GPUs.

    Attributes:
        front_points: the predicted front, fastest first; `source` is "predicted", no window.
        best: the choice among them under the constraints; a slowdown is relative to `baseline`.
        baseline: the space's default configuration there, predicted.
        left_out: number of further configurations that are unlikely to fit in memory.
        windows: number of measured windows that corrected the models.
        probed_gpus: the GPU counts that they ran on.
        simulated: whether those windows were themselves a simulation's.
    """

    gpus: int
    cluster: str
    front_points: tuple[Point, ...]
    best: Point | None
    choice: Choice
    baseline: Point
    candidates: int
    left_out: int
    windows: int
    probed_gpus: tuple[int, ...]
    simulated: bool = False

    @property
    def sentence(self) -> str:
        """Description of the prediction and its basis in a sentence."""
        sizes = ", ".join(str(size) for size in self.probed_gpus)
        plural = "s" if self.windows != 1 else ""
        of = "simulated" if self.simulated else "measured"
        return (
            f"Predicted for {self.gpus} GPUs, not measured: {self.candidates:,} configurations by "
            f"the analytic models, corrected by {self.windows} {of} window{plural} on {sizes} GPUs."
        )

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as JSON values."""
        return {
            "predicted": True,
            "sentence": self.sentence,
            "gpus": self.gpus,
            "cluster": self.cluster,
            "front": [point.to_json() for point in self.front_points],
            "best": self.best.to_json() if self.best else None,
            "choice": asdict(self.choice),
            "baseline": self.baseline.to_json(),
            "candidates": self.candidates,
            "left_out": self.left_out,
            "windows": self.windows,
            "probed_gpus": list(self.probed_gpus),
            "simulated": self.simulated,
        }


def _fitting(
    job: TrainingJob,
    small: Cluster,
    big: Cluster,
    candidates: Candidates,
    records: Sequence[ProbeRecord],
) -> np.ndarray:
    """Probability that each candidate fits, by what the study's peaks and failures say, (n,)."""
    from tuner.models.analytic.model import AnalyticModel
    from tuner.models.memory_margin import learned_margin

    if small.device.type == "cpu" or not small.device.memory_bytes:
        return np.ones(len(candidates))
    peaks: dict[Configuration, float] = {}
    for record in records:
        launch = Configuration(record.request.launch)
        if record.failure is not None and record.failure.type.lacks_memory:
            peaks[launch] = np.inf
        for m in record.measurements:
            peak = float(m.peak_memory_bytes or np.nan)
            peaks[launch] = float(np.fmax(peak, peaks.get(launch, np.nan)))
    launches = list(peaks)
    predicted = AnalyticModel(job, small).memory_bytes(launches) if launches else np.empty(0)
    margin = learned_margin(
        small.device.memory_bytes, predicted, dict(enumerate(peaks[each] for each in launches))
    )
    need = AnalyticModel(job, big).memory_bytes(candidates.configurations)
    return margin.probability_of_fitting(need)


def _near_front(logs: np.ndarray) -> np.ndarray:
    """Rows of the front and the nearest behind it, `NEAR` at most; logs are (time, power)."""
    energy, time = logs.sum(axis=1), logs[:, 0]
    on = nondominated(energy, time)
    behind = np.full(len(logs), np.inf)
    for row in np.flatnonzero(on):  # how far each lies behind the front, on its better axis
        gap = np.maximum(energy - energy[row], time - time[row])
        behind = np.minimum(behind, gap)
    return np.argsort(behind, kind="stable")[:NEAR]


def _points(
    configurations: Sequence[Configuration],
    said: Scaled,
    steps: int,
    meter: MeterInfo,
    fits: np.ndarray,
) -> list[Point]:
    time, power, energy = said.step_time_s, said.power_W, said.energy_J
    points = []
    for i, configuration in enumerate(configurations):
        flags = ["predicted, not measured"]
        if fits[i] < 0.95:
            flags.append(f"fits in memory with probability {fits[i]:.2f}")
        points.append(
            Point(
                configuration=configuration,
                energy_to_solution_kJ=float(energy.median[i]) * steps / 1000,
                time_to_solution_s=float(time.median[i]) * steps,
                energy_interval_kJ=Interval(
                    float(energy.low[i]) * steps / 1000,
                    float(energy.high[i]) * steps / 1000,
                ),
                time_interval_s=Interval(float(time.low[i]) * steps, float(time.high[i]) * steps),
                power_W=float(power.median[i]),
                source="predicted",
                windows=0,
                p_nondominated=math.nan,
                meter=meter,
                flags=tuple(flags),
                power_interval_W=Interval(float(power.low[i]), float(power.high[i])),
            )
        )
    return points


def predict_target(
    problem: Problem,
    records: Sequence[ProbeRecord],
    constraints: Constraints,
    *,
    gpus: int,
    seed: int = 0,
) -> Target:
    """Predict the front of a problem on this number of GPUs.

    Raises:
        InputError: nothing was measured, the problem is a recording's, or no configuration of the
            space uses this number of GPUs.
    """
    from tuner.models.memory_margin import MEMORY_POLICY
    from tuner.models.scale_out import predictor

    if problem.job is None or problem.cluster is None:
        raise InputError("a recording names no job and cluster, which the models need")
    measured = [record for record in records if record.measurements]
    if not measured:
        raise InputError("the run that is to correct the prediction has measured nothing")
    job, meter = problem.job, measured[0].meter
    simulated = meter.is_simulated
    space = load_space(str(problem.identity["space"]["name"]))
    if not any(CHANGED in launch for launch in problem.candidates.launches):
        space = space.same_training()
    small, big = problem.cluster, enlarged(problem.cluster, gpus)
    every = _target_candidates(job, big, space, gpus, plan=simulated)
    fits = _fitting(job, small, big, every, records)
    kept = np.flatnonzero(fits >= MEMORY_POLICY.likely_from)
    if not len(kept):  # nothing is likely to fit: show what is likeliest, and say so
        kept = np.flatnonzero(fits >= fits.max())
    configurations = [every.configurations[row] for row in kept]
    line = corrected_models(job, small, measured)
    there = charged(big, meter)
    logs = line.medians(predictor(job, there, configurations), [gpus] * len(configurations))
    # Configurations that the models cannot tell apart are shown once.
    _, apart = np.unique(np.round(logs, 9), axis=0, return_index=True)
    near = apart[_near_front(logs[apart])]
    baseline = default_configuration(job, big)
    shown = [configurations[row] for row in near]
    chance = fits[kept][near]
    said = line.correct(predictor(job, there, shown), [gpus] * len(shown))
    drawn = said.draws(DRAWS, seed)
    probability = probability_nondominated(drawn.sum(axis=2), drawn[:, :, 0])
    # Relabelled: what a simulated cluster's meter or a real one's counted is not what stands here.
    label = MeterInfo(
        meter.name, meter.scope, "prediction by the analytic models, corrected by probes", True
    )
    points = with_probabilities(_points(shown, said, job.steps, label, chance), probability)
    alone = line.correct(predictor(job, there, [baseline]), [baseline.world_size])
    (base,) = _points([baseline], alone, job.steps, label, np.ones(1))
    limits = constraints.relative_to(base.time_to_solution_s)
    best, choice = Judge(points, base, limits, job.steps).choose()
    sizes = {Configuration(record.request.launch).world_size for record in measured}
    return Target(
        gpus=gpus,
        cluster=problem.cluster.name,
        front_points=front_of(points),
        best=best,
        choice=choice,
        baseline=base,
        candidates=len(configurations),
        left_out=len(every) - len(configurations),
        windows=sum(len(record.measurements) for record in measured),
        probed_gpus=tuple(sorted(sizes)),
        simulated=simulated,
    )


def _target_candidates(
    job: TrainingJob, big: Cluster, space: SearchSpace, gpus: int, *, plan: bool = False
) -> Candidates:
    """Return the configurations of a space that use this number of GPUs of a cluster.

    Without `plan` what the built-in training program cannot run yet is left out.
    """
    if not job.is_modelled:
        raise InputError(
            "a prediction for more GPUs needs the job's model and sequence length, which are not "
            f"known for {job.name!r}"
        )
    valid = space.candidates(job, big)
    kept = [
        each
        for each in valid.configurations
        if each.world_size == gpus and (plan or not unrunnable(each, job))
    ]
    if not kept:
        largest = max(each.world_size for each in valid.configurations)
        raise InputError(
            f"space {space.name!r} has no configuration of job {job.name!r} on {gpus} GPUs (the "
            f"most that one uses is {largest}); a larger global batch than {job.global_batch} "
            "feeds more"
        )
    return Candidates.from_configurations(kept)

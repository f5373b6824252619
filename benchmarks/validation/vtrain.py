"""vTrain's measured iteration times on A100, and their figures for any predictor.

1,440 launches on one node (144 problems: GPUs, global batch, width and depth) and 109 on 64 to 512
GPUs, over tensor, data and pipeline parallelism and micro-batch, by Megatron-DeepSpeed in 16 bits
with full recomputation (`benchmarks/data/vtrain.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from benchmarks.validation.comparison import DATA, gpt2, rows_of
from tuner.models.analytic.constants import Constants, constants_of
from tuner.models.analytic.model import AnalyticModel, Program
from tuner.models.scale_out import Predict, ScaleOut
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob

#: GPT-2's vocabulary as Megatron-LM pads it.
VOCABULARY = 51200
#: The program: scores stored and dropped, and Megatron-LM's loss.
PROGRAM = Program(fused_attention=False, vocabulary_parallel_loss=True)
#: Numbers of GPUs of a node, and bytes per second of its network for each (800 Gbit/s a node).
NODE, NETWORK_BPS = 8, 12.5e9
#: Problems whose choice is judged have this many launches at least.
CHOICES = 8


@dataclass(frozen=True)
class Launch:
    """One row.

    Attributes:
        single: True if it ran on one node.
        problem: (GPUs, global batch, width, heads, layers, sequence length).
        degrees: (tensor, data, pipeline) parallelism and micro-batch.
        measured_s: seconds of a step.
    """

    single: bool
    problem: tuple[int, ...]
    degrees: tuple[int, int, int, int]
    measured_s: float

    @cached_property
    def configuration(self) -> Configuration:
        tensor, data, pipeline, micro_batch = self.degrees
        return Configuration.of(
            tensor_parallel=tensor,
            data_parallel=data,
            pipeline_parallel=pipeline,
            micro_batch=micro_batch,
            zero_stage=0,
            activation_checkpointing="full",
        )


def read_launches() -> list[Launch]:
    """Return the rows of both tables."""
    found = []
    for name in ("single", "multi"):
        rows = rows_of(DATA / f"vtrain_{name}.csv")
        found += [_launch(row, single=name == "single") for row in rows]
    return found


def _launch(row: dict[str, str], *, single: bool) -> Launch:
    problem = ("# GPUs", "global batch", "hidden size", "attention heads", "# layers")
    degrees = ("tensor parallelism", "data parallelism", "pipeline parallelism", "micro batch")
    tensor, data, pipeline, micro_batch = (int(row[name]) for name in degrees)
    return Launch(
        single,
        tuple(int(row[name]) for name in (*problem, "sequence length")),
        (tensor, data, pipeline, micro_batch),
        float(row["iteration time (ms)"]) / 1e3,
    )


def problems(launches: Sequence[Launch]) -> dict[tuple[int, ...], list[Launch]]:
    found: dict[tuple[int, ...], list[Launch]] = {}
    for launch in launches:
        found.setdefault(launch.problem, []).append(launch)
    return found


def job_of(problem: tuple[int, ...]) -> TrainingJob:
    _, batch, hidden, heads, layers, sequence = problem
    return TrainingJob(
        name="vtrain",
        model=gpt2(hidden, layers, heads, positions=sequence, vocabulary=VOCABULARY),
        sequence_length=sequence,
        global_batch=batch,
        steps=1,
    )


def cluster_of(problem: tuple[int, ...]) -> Cluster:
    nodes = max(1, problem[0] // NODE)
    return replace(load_cluster("a100-8"), nodes=nodes, network_Bps=NETWORK_BPS)


def model_of(problem: tuple[int, ...], constants: Constants | None = None) -> AnalyticModel:
    return AnalyticModel(job_of(problem), cluster_of(problem), constants=constants, program=PROGRAM)


def predicted_s(launches: Sequence[Launch], constants: Constants | None = None) -> np.ndarray:
    """Return the predicted seconds of launches of one problem."""
    model = model_of(launches[0].problem, constants)
    return model.predict([launch.configuration for launch in launches]).step_time_s


def first_launch(launches: Sequence[Launch]) -> Launch:
    """Return what a user runs today: the widest data parallelism, one sequence a micro-batch."""
    return min(launches, key=lambda launch: (-launch.degrees[1], launch.degrees[3]))


def one_launch_s(launches: Sequence[Launch]) -> np.ndarray:
    """Return the seconds of launches of one problem by the models that the first one corrected."""

    def predict(of: Sequence[Launch]) -> Predict:
        return lambda constants: np.log(predicted_s(of, constants))[:, None]

    first = first_launch(launches)
    model = ScaleOut(
        constants_of(load_cluster("a100-8").device),
        predict([first]),
        gpus=[first.problem[0]],
        launches=["first"],
        measured=np.log([[first.measured_s]]),
    )
    gpus = [launch.problem[0] for launch in launches]
    return np.exp(model.medians(predict(launches), gpus)[:, 0])


@dataclass(frozen=True)
class Score:
    """Errors of a planner on some launches.

    Attributes:
        errors: predicted over measured seconds, less one.
        right, pairs: pairs of launches of one problem that it puts in the right order, of all.
        losses: for each problem of `CHOICES` launches or more, how much slower its choice is than
            the best launch.
    """

    errors: np.ndarray
    right: int
    pairs: int
    losses: np.ndarray

    @property
    def mean(self) -> float:
        return float(100 * np.abs(self.errors).mean())

    @property
    def median(self) -> float:
        return float(100 * np.median(np.abs(self.errors)))

    @property
    def choice_loss(self) -> float:
        """Mean loss of the choice, %; NaN without a problem to choose in."""
        return float(100 * self.losses.mean()) if len(self.losses) else float("nan")


def merged(scores: Sequence[Score]) -> Score:
    return Score(
        np.concatenate([each.errors for each in scores]),
        sum(each.right for each in scores),
        sum(each.pairs for each in scores),
        np.concatenate([each.losses for each in scores]),
    )


def score(
    predict: Callable[[Sequence[Launch]], np.ndarray],
    launches: Sequence[Launch],
    *,
    leave_out: Callable[[Sequence[Launch]], Launch] | None = None,
) -> Score:
    """Compare a planner with launches.

    Args:
        predict: seconds of launches of one problem.
        leave_out: the launch of a problem that the planner saw: left out of errors and pairs, and
            there to be chosen. Problems of fewer than `CHOICES` launches are then left out.
    """
    errors: list[float] = []
    losses, right, pairs = [], 0, 0
    for group in problems(launches).values():
        if leave_out is not None and len(group) < CHOICES:
            continue
        measured = np.array([launch.measured_s for launch in group])
        said = np.asarray(predict(group))
        if len(group) >= CHOICES:
            losses.append(measured[said.argmin()] / measured.min() - 1)
        if leave_out is not None:
            seen = group.index(leave_out(group))
            measured, said = np.delete(measured, seen), np.delete(said, seen)
        errors += list(said / measured - 1)
        i, j = np.triu_indices(len(measured), 1)
        right += int(((said[i] < said[j]) == (measured[i] < measured[j])).sum())
        pairs += len(i)
    return Score(np.array(errors), right, pairs, np.array(losses))

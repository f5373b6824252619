"""Configurations as arrays for the analytic models, with one row per launch.

Many configurations differ only in a clock, so launch knobs are read for the distinct launches, and
100,000 configurations are predicted in a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InvalidValue
from tuner.search_spaces.knobs import KNOBS

#: Knobs whose effect the analytic models do not predict, each with the reason.
UNMODELLED = {
    "compilation": "of the time on the device: what fused operators save there is published for "
    "single models only",
}

#: Kinds of scaling in FP8, whose numbers `Launches.fp8` holds.
FP8 = ("none", "tensorwise", "rowwise", "mx")

_DEGREES = {
    "d": "data_parallel",
    "t": "tensor_parallel",
    "p": "pipeline_parallel",
    "u": "sequence_parallel",
    "e": "expert_parallel",
    "b": "micro_batch",
    "z": "zero_stage",
    "v": "virtual_stages",
    "groups": "hsdp_replicas",
}


@dataclass(frozen=True)
class Launches:
    """Launch knobs as arrays, one entry per launch."""

    # d, t, p, u, e: data, tensor, pipeline, sequence and expert parallel degrees.
    d: np.ndarray
    t: np.ndarray
    p: np.ndarray
    u: np.ndarray
    e: np.ndarray
    b: np.ndarray  # sequences of a micro-batch
    z: np.ndarray  # ZeRO stage
    # True if ranks of one sequence gather all keys and values instead of exchanging heads.
    gathered: np.ndarray
    v: np.ndarray
    zero_bubble: np.ndarray
    m: np.ndarray  # number of micro-batches per replica and step
    recomputed: np.ndarray  # share of the blocks that are recomputed in the backward pass
    selective: np.ndarray  # True if all blocks keep their matrix products and recompute the rest
    parameters_offloaded: np.ndarray
    offload: np.ndarray
    offload_async: np.ndarray
    offload_nvme: np.ndarray
    parameters_nvme: np.ndarray
    # fsdp, reshard: True if FSDP2 shards in place of ZeRO, and frees gathered parameters after the
    # forward pass.
    fsdp: np.ndarray
    reshard: np.ndarray
    groups: np.ndarray  # groups of HSDP that each hold a whole copy of the states; 1 without
    # True if blocks are compiled: their dispatch is shorter, and the casts of FP8 are fused.
    compiled: np.ndarray
    fp8: np.ndarray  # kind of scaling of the blocks' products in FP8, a number of `FP8`; 0 without
    activations: np.ndarray
    activations_async: np.ndarray

    @property
    def replicas(self) -> np.ndarray:
        """Ranks that hold the same parameters before ZeRO shards: data x sequence parallel."""
        return self.d * self.u

    @property
    def shards(self) -> np.ndarray:
        """Ranks over which FSDP2 shards the states: the replicas of one group."""
        return self.replicas / self.groups

    @property
    def ranks(self) -> np.ndarray:
        """Number of ranks."""
        return self.d * self.t * self.p * self.u

    def __len__(self) -> int:
        return len(self.d)

    def __getitem__(self, rows: Any) -> Launches:
        return Launches(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass(frozen=True)
class Layout:
    """Configurations as arrays."""

    launches: Launches
    row: np.ndarray
    # clock_MHz, limit_W, memory_clock_MHz: live settings, shape (n,); NaN if left to the device or
    # set per stage.
    clock_MHz: np.ndarray
    limit_W: np.ndarray
    memory_clock_MHz: np.ndarray
    # stage_clocks_MHz, stage_limits_W: settings per stage, by the configuration's number.
    stage_clocks_MHz: dict[int, tuple[int, ...]]
    stage_limits_W: dict[int, tuple[int, ...]]

    @property
    def is_staged(self) -> bool:
        """True if some configuration has a setting per stage."""
        return bool(self.stage_clocks_MHz or self.stage_limits_W)


def _value(settings: Settings, name: str) -> object:
    return settings.get(name, KNOBS[name].default if name in KNOBS else None)


def _recomputed(settings: Settings) -> float:
    mode = str(_value(settings, "activation_checkpointing"))
    return 1.0 / int(mode.removeprefix("every_")) if mode.startswith("every_") else mode == "full"


def _read_launches(launches: Sequence[Settings], global_batch: int, compiled: bool) -> Launches:
    degrees: dict[str, np.ndarray] = {}
    for short, name in _DEGREES.items():
        values = [_value(launch, name) for launch in launches]
        for value in values:
            if not isinstance(value, int):
                raise InvalidValue(name, value, "an integer")
        degrees[short] = np.array(values, dtype=float)

    chosen = [launch.get("global_batch") for launch in launches]
    batches = np.array([b if isinstance(b, int) else global_batch for b in chosen], dtype=float)

    def holds(name: str, *values: str) -> np.ndarray:
        return np.array([_value(launch, name) in values for launch in launches], dtype=bool)

    return Launches(
        **degrees,
        gathered=holds("sequence_method", "all_gather"),
        zero_bubble=holds("pipeline_schedule", "zero_bubble"),
        m=np.maximum(1.0, np.round(batches / (degrees["b"] * degrees["d"]))),
        recomputed=np.array([_recomputed(launch) for launch in launches], dtype=float),
        selective=holds("activation_checkpointing", "selective"),
        parameters_offloaded=holds("parameter_offload", "cpu", "nvme"),
        offload=holds("optimizer_offload", "cpu", "async", "nvme"),
        offload_async=holds("optimizer_offload", "async"),
        offload_nvme=holds("optimizer_offload", "nvme"),
        parameters_nvme=holds("parameter_offload", "nvme"),
        fsdp=holds("sharding", "fsdp2", "fsdp2_no_reshard"),
        reshard=holds("sharding", "fsdp2"),
        compiled=np.array(
            [
                launch.get("compilation", "none" if not compiled else "full") != "none"
                for launch in launches
            ],
            dtype=bool,
        ),
        fp8=np.array([FP8.index(str(_value(launch, "fp8"))) for launch in launches], dtype=int),
        activations=holds("activation_offload", "sync", "async"),
        activations_async=holds("activation_offload", "async"),
    )


def read_layout(
    configurations: Sequence[Configuration], global_batch: int, *, compiled: bool = False
) -> Layout:
    """Read configurations into arrays; `compiled` if the program compiles where no knob says so."""
    launches: dict[Settings, int] = {}
    row = np.empty(len(configurations), dtype=np.intp)
    lives: dict[Settings, int] = {}
    live_row = np.empty(len(configurations), dtype=np.intp)
    for i, configuration in enumerate(configurations):
        row[i] = launches.setdefault(configuration.launch, len(launches))
        live_row[i] = lives.setdefault(configuration.live, len(lives))
    return _layout(list(launches), row, list(lives), live_row, global_batch, compiled)


def layout_of_groups(
    groups: Sequence[tuple[Settings, tuple[Settings, ...]]],
    global_batch: int,
    *,
    compiled: bool = False,
) -> Layout:
    """Read launches with their live settings into arrays, group by group.

    Of many configurations this is ten times as fast as `read_layout`, because launches share few
    lists of live settings and no configuration is made.
    """
    lists: dict[int, np.ndarray] = {}
    lives: dict[Settings, int] = {}
    for _, each in groups:
        if id(each) not in lists:
            rows = [lives.setdefault(live, len(lives)) for live in each]
            lists[id(each)] = np.array(rows, dtype=np.intp)
    sizes = [len(each) for _, each in groups]
    row = np.repeat(np.arange(len(groups)), sizes)
    live_row = np.concatenate([lists[id(each)] for _, each in groups])
    launches = [launch for launch, _ in groups]
    return _layout(launches, row, list(lives), live_row, global_batch, compiled)


def _layout(
    launches: Sequence[Settings],
    row: np.ndarray,
    lives: Sequence[Settings],
    live_row: np.ndarray,
    global_batch: int,
    compiled: bool,
) -> Layout:
    def live(name: str) -> tuple[np.ndarray, dict[int, tuple[int, ...]]]:
        values = [settings.get(name) for settings in lives]
        numbers = np.array(
            [np.nan if v is None or isinstance(v, tuple) else v for v in values], dtype=float
        )
        staged = {i: v for i, v in enumerate(values) if isinstance(v, tuple)}
        by_number = {}
        if staged:
            by_number = {i: staged[int(j)] for i, j in enumerate(live_row) if int(j) in staged}
        return numbers[live_row] if len(numbers) else np.empty(0), by_number

    clock, stage_clocks = live("clock_MHz")
    limit, stage_limits = live("power_limit_W")
    memory_clock, _ = live("memory_clock_MHz")
    return Layout(
        launches=_read_launches(launches, global_batch, compiled),
        row=row,
        clock_MHz=clock,
        limit_W=limit,
        memory_clock_MHz=memory_clock,
        stage_clocks_MHz=stage_clocks,
        stage_limits_W=stage_limits,
    )

"""The table of a plan, which its run folder keeps: predictions, their errors, and the facts.

A result is made of it again under any constraints (`tuner.planning.plan`), so that a plan is asked
anew without predicting anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import write_text
from tuner.search_spaces.typed import read_fields, strict_json

#: Name of the file in a run folder.
PLAN_FILE = "plan.json"
#: Version of the file.
SCHEMA = 1
#: Most that is read of it.
MAX_BYTES = 256 * 2**20


@dataclass(frozen=True)
class PlanRow:
    """One configuration; every figure but the memory is of a logarithm.

    Attributes:
        log_time, log_power: of a step, s and W.
        time_ratio_sd, energy_ratio_sd: of the ratio to the baseline.
        p_nondominated: probability of being on the front.
    """

    configuration: Configuration
    log_time: float
    log_power: float
    time_se: float
    power_se: float
    time_ratio_sd: float
    energy_ratio_sd: float
    p_nondominated: float
    memory_bytes: float

    @property
    def of_point(self) -> dict[str, Any]:
        """Columns that a point has under these names."""
        memory = {"peak_memory_bytes": int(self.memory_bytes)}
        return {"p_nondominated": self.p_nondominated, **memory}


@dataclass(frozen=True)
class PlanTable:
    """The table of a plan.

    Attributes:
        baseline: number of the baseline's row.
        configurations, fitting: how many were predicted, and how many of them fit in memory.
        probes: rows whose measurement would teach most, the baseline first.
    """

    rows: tuple[PlanRow, ...]
    baseline: int
    configurations: int
    fitting: int
    seconds: float
    gpus: tuple[int, ...]
    probes: tuple[int, ...]
    attainment: Mapping[str, Any]


def write_plan(table: PlanTable, folder: Path) -> None:
    """Write the table into a run folder."""
    rows = [{**vars(row), "configuration": row.configuration.to_json()} for row in table.rows]
    data = {"schema": SCHEMA, **vars(table), "rows": rows}
    write_text(folder / PLAN_FILE, json.dumps(strict_json(data)) + "\n")


def read_plan(folder: Path) -> PlanTable:
    """Read the table of a run folder.

    Raises:
        InputError: it is no table of a plan, or a newer release wrote it.
    """
    path = folder / PLAN_FILE
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it holds more than {MAX_BYTES // 2**20} MiB")
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise InputError(f"{path} was written by a newer joulefront; this one reads {SCHEMA}")
        table = read_fields(PlanTable, data, "plan", rows=_rows, attainment=_attainment)
        for number in (table.baseline, *table.probes):
            if not 0 <= number < len(table.rows):
                raise ValueError(f"it has no row {number}")
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"cannot read the plan {path}: {error!r}") from error
    return table


def _rows(data: Iterable[Any]) -> tuple[PlanRow, ...]:
    read = Configuration.from_json
    return tuple(read_fields(PlanRow, row, "row of a plan", configuration=read) for row in data)


def _attainment(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: int(value)
        if name == "draws"
        else tuple(math.inf if number is None else float(number) for number in value)
        for name, value in data.items()
    }

"""Windows of a study, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.workload.records.probe import Measurement, ProbeRecord


@dataclass(frozen=True)
class Windows:
    """Every window of every measured configuration, row by row."""

    configurations: list[Configuration]
    measurements: list[Measurement]
    records: list[ProbeRecord]
    launches: np.ndarray  # number of that probe, which is one launch, (rows,)

    @classmethod
    def of(cls, records: Sequence[ProbeRecord]) -> Windows:
        """Return the windows of these probes."""
        rows = [(number, r, m) for number, r in enumerate(records) for m in r.measurements]
        scopes = sorted({record.meter.scope for _, record, _ in rows})
        if len(scopes) > 1:
            raise InputError(
                f"the probes charge the energy of different scopes ({', '.join(scopes)}), which "
                "one front cannot hold; give the study another name for each scope"
            )
        return cls(
            [Configuration(record.request.launch, m.live) for _, record, m in rows],
            [m for _, _, m in rows],
            [record for _, record, _ in rows],
            np.array([number for number, _, _ in rows], dtype=int),
        )

    @property
    def as_delivered(self) -> list[Configuration]:
        """Delivered configurations, the models' input: a requested clock may not have held."""
        pairs = zip(self.records, self.measurements, strict=True)
        return [Configuration(record.request.launch, m.as_delivered) for record, m in pairs]

    @property
    def step_time_s(self) -> np.ndarray:
        """Step times, (rows,)."""
        return np.array([m.step_time_s for m in self.measurements], dtype=float)

    @property
    def power_W(self) -> np.ndarray:
        """Powers of the whole job, (rows,)."""
        return np.array([m.power_W for m in self.measurements], dtype=float)

    @property
    def relative_errors(self) -> tuple[np.ndarray, np.ndarray]:
        """Stated relative standard errors of step time and power; NaN where unknown."""
        time = [m.step_time_rse for m in self.measurements]
        power = [m.power_rse for m in self.measurements]
        # A file may state any number; a thousandfold error says as little, and its square is one.
        return tuple(np.clip(np.array(rse, dtype=float), 0.0, 1e3) for rse in (time, power))

    @cached_property
    def rows(self) -> dict[Configuration, list[int]]:
        """Rows of each configuration, in the order in which they were first measured."""
        rows: dict[Configuration, list[int]] = {}
        for row, configuration in enumerate(self.configurations):
            rows.setdefault(configuration, []).append(row)
        return rows

    @property
    def logs(self) -> np.ndarray:
        """Logarithms of step time and power, (rows, 2)."""
        return np.log(np.column_stack([self.step_time_s, self.power_W]))

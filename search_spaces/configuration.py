"""A configuration: one point of the search space, as launch knobs and live knobs.

Both halves are `Settings`, a frozen mapping that hashes and prints in one canonical order, so that
a configuration can be a key, a line in a trace and a row of a table alike. Knobs that are not named
stand at their defaults (`search_spaces.knobs.KNOBS`), so a record made before a knob existed still
means the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from search_spaces.errors import InputError, InvalidValue
from search_spaces.knobs import KNOBS, Value, knob_named

__all__ = ["Configuration", "Settings"]


class Settings(Mapping[str, Value]):
    """A frozen, hashable mapping from knob name to value, ordered by name."""

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Mapping[str, Any] | None = None, /, **more: Value) -> None:
        merged = dict(values or {}, **more)
        self._values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in sorted(merged.items())
        }
        self._hash = hash(tuple(self._values.items()))

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Settings):
            return self._values == other._values
        return NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return (Settings, (dict(self._values),))

    @property
    def key(self) -> str:
        """One canonical line, e.g. "data_parallel=2 zero_stage=1"; "default" when empty."""
        parts = []
        for name, value in self._values.items():
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            parts.append(f"{name}={text}")
        return " ".join(parts) or "default"

    def __repr__(self) -> str:
        return f"Settings({self.key})"

    def to_json(self) -> dict[str, Any]:
        """Plain types, for a JSON line (a tuple becomes a list)."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in self._values.items()}


@dataclass(frozen=True)
class Configuration:
    """One point of the search space.

    Attributes:
        launch: knobs that need a new process to change.
        live: knobs that change while the job runs; empty means "left to the device".
    """

    launch: Settings
    live: Settings = field(default_factory=Settings)

    @classmethod
    def of(cls, values: Mapping[str, Any] | None = None, /, **more: Any) -> Configuration:
        """Build from standard knobs, each checked and put in its half.

        Raises:
            UnknownName: a name is no knob's.
            InvalidValue: a value is not legal for its knob.
        """
        launch: dict[str, Value] = {}
        live: dict[str, Value] = {}
        for name, value in dict(values or {}, **more).items():
            knob = knob_named(name)
            (launch if knob.kind == "launch" else live)[name] = knob.check(value)
        return cls(Settings(launch), Settings(live))

    @property
    def key(self) -> str:
        """One canonical line: the launch settings, then the live ones."""
        return self.launch.key if not self.live else f"{self.launch.key} | {self.live.key}"

    def get(self, name: str) -> Value | None:
        """A knob's value, or its default where this configuration does not name it."""
        for half in (self.launch, self.live):
            if name in half:
                return half[name]
        return KNOBS[name].default if name in KNOBS else None

    def _degree(self, name: str) -> int:
        value, least = self.get(name), KNOBS[name].minimum or 0
        if not isinstance(value, int) or value < least:
            raise InvalidValue(name, value, f"an integer of at least {least}")
        return value

    data_parallel = property(lambda self: self._degree("data_parallel"))
    tensor_parallel = property(lambda self: self._degree("tensor_parallel"))
    pipeline_parallel = property(lambda self: self._degree("pipeline_parallel"))
    sequence_parallel = property(lambda self: self._degree("sequence_parallel"))
    expert_parallel = property(lambda self: self._degree("expert_parallel"))
    micro_batch = property(lambda self: self._degree("micro_batch"))
    zero_stage = property(lambda self: self._degree("zero_stage"))

    @property
    def world_size(self) -> int:
        """Ranks: DP x TP x PP x SP. Experts are spread over ranks that these already count."""
        return (
            self.data_parallel
            * self.tensor_parallel
            * self.pipeline_parallel
            * self.sequence_parallel
        )

    def accumulation(self, global_batch: int) -> int:
        """Micro-batches a replica takes each step, so that the global batch stays as asked.

        Raises:
            InvalidValue: the global batch is not a multiple of micro-batch x data parallelism.
        """
        share = self.micro_batch * self.data_parallel
        if global_batch % share:
            raise InvalidValue(
                "micro_batch x data_parallel",
                share,
                f"a divisor of the global batch {global_batch}",
            )
        return global_batch // share

    def to_json(self) -> dict[str, Any]:
        return {"launch": self.launch.to_json(), "live": self.live.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Configuration:
        """Read what `to_json` wrote. Knobs of a recorded table pass unchecked, as they must.

        Raises:
            InputError: there is no table "launch", or a value is none that a knob can have.
        """
        try:
            return cls(Settings(data["launch"]), Settings(data.get("live", {})))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(f"{data!r} is not a configuration: {error!r}") from error

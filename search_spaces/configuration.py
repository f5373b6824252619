"""Configurations: points of the search space, made of launch knobs and live knobs.

Both halves are `Settings`, a frozen mapping that hashes and prints in one canonical order, so that
a configuration can be a key, a line in a trace and a row of a table. Missing knobs have their
defaults (`tuner.search_spaces.knobs.KNOBS`), so a record made before a knob existed keeps its
meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.fields import plain_setting
from tuner.search_spaces.knobs import (
    KNOBS,
    Value,
    by_stage,
    knob_named,
    short_name,
    stage_values,
    value_text,
    values_of,
)


class Settings(Mapping[str, Value]):
    """Frozen, hashable mapping from knob name to value, ordered by name."""

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Mapping[str, Any] | None = None, /, **more: Value) -> None:
        merged = dict(values or {}, **more)
        self._values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in sorted(merged.items())
        }
        self._hash = hash(tuple(self._values.items()))

    @classmethod
    def from_json(cls, data: Any, subject: str) -> Settings:
        """Read a table of knob values; those of a recorded table's own knobs may be texts."""
        settings = cls(plain_setting(data, subject))
        for name, value in settings.items():
            knob = KNOBS.get(name)
            texts = [part for part in stage_values(value) if isinstance(part, str)]
            if knob and not knob.choices and texts:
                raise InvalidValue(f"{name} in {subject}", value, "a number")
        return settings

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
        """Canonical text, for example "data_parallel=2 zero_stage=1"; "default" if empty."""
        words = (f"{name}={value_text(value)}" for name, value in self._values.items())
        return " ".join(words) or "default"

    @property
    def short(self) -> str:
        """Short name (`tuner.search_spaces.knobs`), for example "dp2 zero1"."""
        return short_name(self._values)

    def __repr__(self) -> str:
        return f"Settings({self.key})"

    def to_json(self) -> dict[str, Any]:
        """Return plain types for JSON (a tuple becomes a list)."""
        return {k: list(v) if by_stage(v) else v for k, v in self._values.items()}


@dataclass(frozen=True)
class Configuration:
    """Point of the search space; missing live knobs are left to the device."""

    launch: Settings
    live: Settings = field(default_factory=Settings)

    @classmethod
    def of(cls, values: Mapping[str, Any] | None = None, /, **more: Any) -> Configuration:
        """Build from standard knobs, each checked and put in its half."""
        launch: dict[str, Value] = {}
        live: dict[str, Value] = {}
        for name, value in dict(values or {}, **more).items():
            knob = knob_named(name)
            (launch if knob.kind == "launch" else live)[name] = knob.check(value)
        return cls(Settings(launch), Settings(live))

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """Read a name such as "dp8 mb16 zero1 1050MHz", or KNOB=VALUE words, in any order."""
        return cls.of(values_of([text]))

    @property
    def short(self) -> str:
        """Short name for people: "dp8 mb16 zero1 1050MHz"; `parse` reads it back."""
        return short_name({**self.launch, **self.live})

    @property
    def key(self) -> str:
        """Canonical text: the launch settings, then the live ones."""
        return self.launch.key if not self.live else f"{self.launch.key} | {self.live.key}"

    def get(self, name: str) -> Value | None:
        """Return a knob's value, or its default if this configuration does not give one."""
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
        """Number of ranks: DP x TP x PP x SP. Experts are distributed over these."""
        replicas = self.data_parallel * self.tensor_parallel
        return replicas * self.pipeline_parallel * self.sequence_parallel

    def accumulation(self, global_batch: int) -> int:
        """Return the number of micro-batches per replica and step for a global batch."""
        share = self.micro_batch * self.data_parallel
        if global_batch % share:
            legal = f"a divisor of the global batch {global_batch}"
            raise InvalidValue("micro_batch x data_parallel", share, legal)
        return global_batch // share

    def to_json(self) -> dict[str, Any]:
        """Return plain types for JSON."""
        return {"launch": self.launch.to_json(), "live": self.live.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Configuration:
        """Read the output of `to_json`; knobs of a recorded table are not checked."""
        try:
            launch, live = data["launch"], data.get("live", {})
            subject = "a configuration"
            return cls(Settings.from_json(launch, subject), Settings.from_json(live, subject))
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise InputError(f"{data!r} is not a configuration: {error!r}") from error

"""Constraints and objective of the training job: energy, time, power, GPUs, what to minimize."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypedDict, Unpack

from tuner.formatting import Units, number
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.options import check_options, declared_options, option, parse_quantity

#: Objectives that the user can choose, with the exponents of energy and of time whose product is to
#: be least; None if it is no such product.
OBJECTIVES: dict[str, tuple[float, float] | None] = {
    "energy": (1.0, 0.0),
    "time": (0.0, 1.0),
    "edp": (1.0, 1.0),
    "cost": None,
    "carbon": (1.0, 0.0),
    "knee": None,
}


class JobFigures(NamedTuple):
    """Figures of the whole training that limits are on; None for what is unknown."""

    energy_kJ: float
    time_s: float
    power_W: float
    peak_power_W: float | None = None
    gpus: int | None = None


@dataclass(frozen=True)
class Limit:
    """Limit on the training job, a row of `LIMITS`; `name` is a field of `Constraints`, `figure`
    one of `JobFigures`.

    Attributes:
        phrase: returns what it asks, as in "within 25 kJ".
        text: returns a value with a number of digits, as the object of a sentence.
        exponents: of the time and the power of a step, whose product is limited; None if the models
            predict nothing of it.
        scale: joules, seconds or watts of one unit of the limit.
        of_job: it is on all steps together.
    """

    name: str
    figure: str
    noun: str
    label: str
    phrase: Callable[[float, Units], str]
    text: Callable[[float, Units, int], str]
    exponents: tuple[float, float] | None = None
    scale: float = 1.0
    of_job: bool = True

    def of_step(self, value: float, steps: int) -> float:
        """Return the limit on one of the job's steps, in J, s or W."""
        return value * self.scale / (steps if self.of_job else 1)


#: Every limit on the training job.
LIMITS = (
    Limit(
        "budget_kJ",
        "energy_kJ",
        "energy budget",
        "energy budget of the job (kJ)",
        lambda value, units: f"within {units.energy_text(value)}",
        lambda value, units, digits: units.energy_text(value, digits),
        exponents=(1.0, 1.0),
        scale=1000.0,
    ),
    Limit(
        "deadline_s",
        "time_s",
        "deadline",
        "deadline (s)",
        lambda value, units: f"within {units.time_text(value)}",
        lambda value, units, digits: units.time_text(value, digits),
        exponents=(1.0, 0.0),
    ),
    Limit(
        "power_cap_W",
        "power_W",
        "power cap",
        "cap on the average power (W)",
        lambda value, _: f"at no more than {number(value)} W on average",
        lambda value, _, digits: f"{number(value, digits)} W on average",
        exponents=(0.0, 1.0),
        of_job=False,
    ),
    Limit(
        "peak_power_W",
        "peak_power_W",
        "cap on peak power",
        "cap on the peak power (W)",
        lambda value, _: f"at no more than {number(value)} W at any moment",
        lambda value, _, digits: f"a peak of {number(value, digits)} W",
    ),
    Limit(
        "max_gpus",
        "gpus",
        "number of GPUs",
        "most devices",
        lambda value, _: f"on at most {value:.0f} GPU{'s' * (value != 1)}",
        lambda value, *_: f"{value:.0f} GPU{'s' * (round(value) != 1)}",
    ),
)


def given_limits(values: Mapping[str, float]) -> list[tuple[Limit, float]]:
    """Return the limits among these values by name, each with its value."""
    rows = {limit.name: limit for limit in LIMITS}
    return [(rows[name], value) for name, value in values.items() if name in rows]


def limit_on(figure: str, values: Mapping[str, float]) -> float | None:
    """Return the limit on a field of `JobFigures` among these values; None without one."""
    return next((value for row, value in given_limits(values) if row.figure == figure), None)


class Limits(TypedDict, total=False):
    """Limits on the training job as keywords: a number in the unit of the name, or a quantity with
    its unit ("2h", "11kWh", "2kW", "5%")."""

    budget_kJ: float | None
    budget: str | None
    deadline_s: float | None
    deadline: str | None
    max_slowdown: float | str | None
    power_cap_W: float | None
    power_cap: str | None


@dataclass(frozen=True)
class Constraints:
    """Limits on the training job, and the objective among the configurations that meet them.

    Without limits and objective the knee of the front is chosen; under a deadline alone the least
    energy; else the least time. A point with no power samples is not chosen under `peak_power_W`.
    `max_slowdown` becomes a deadline once the baseline was measured (`relative_to`).

    Raises:
        InputError: a value is not legal, or a price or an intensity does not go with the objective.
    """

    budget_kJ: float | None = option(
        None,
        "maximum energy of the whole training job, in the scope of the meter",
        unit="kJ",
        above=0,
        alias="budget",
    )
    deadline_s: float | None = option(
        None, "maximum time of the whole training job", unit="s", above=0, alias="deadline"
    )
    max_slowdown: float | None = option(
        None,
        "maximum share by which the training job may take longer than today",
        unit="share",
        least=0,
        alias="max-slowdown",
    )
    power_cap_W: float | None = option(
        None,
        "maximum average power of the training job",
        unit="W",
        above=0,
        alias="power-cap",
    )
    peak_power_W: float | None = option(
        None,
        "maximum of any power sample of the training job",
        unit="W",
        above=0,
        alias="peak-power",
    )
    max_gpus: int | None = option(
        None, "maximum number of GPUs (one rank each) of the training job", least=1
    )
    objective: str | None = option(
        None,
        "what to minimize among the configurations that meet the limits: energy, time, edp (energy "
        "x time), cost or carbon",
        choices=tuple(OBJECTIVES),
        flag="minimize",
        metavar="WHAT",
    )
    price_per_kWh: float | None = option(
        None, "energy price per kWh in any currency, for --minimize cost", above=0
    )
    price_per_gpu_hour: float | None = option(
        None, "price of one GPU for one hour, for --minimize cost", above=0
    )
    grid_gCO2_per_kWh: float | None = option(
        None, "carbon intensity of the grid, for --minimize carbon", unit="g CO2e/kWh", above=0
    )

    baseline_time_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.objective, str):  # runs recorded before hold "least-energy"
            object.__setattr__(self, "objective", self.objective.removeprefix("least-"))
        check_options(self)
        if self.objective == "cost" and not any(self.prices):
            raise InputError(
                "minimizing cost needs price_per_kWh, price_per_gpu_hour or both; no price is "
                "assumed"
            )
        if self.objective == "carbon" and self.grid_gCO2_per_kWh is None:
            raise InputError(
                "minimizing carbon needs grid_gCO2_per_kWh, the intensity of your grid; none is "
                "assumed"
            )
        if self.objective != "cost" and any(self.prices):
            raise InputError("a price is for minimizing cost (--minimize cost)")
        if self.objective != "carbon" and self.grid_gCO2_per_kWh is not None:
            raise InputError("grid_gCO2_per_kWh is for minimizing carbon (--minimize carbon)")

    def limited(self, **limits: Unpack[Limits]) -> Constraints:
        """Return these constraints with the limits that are not None."""
        declared = [(item.name, option) for item, option in declared_options(Constraints)]
        names = {option.alias.replace("-", "_"): name for name, option in declared if option.alias}
        units = {name: option.unit for name, option in declared}
        given: dict[str, Any] = {}
        for keyword, value in limits.items():
            if keyword not in Limits.__annotations__:
                known = ", ".join(Limits.__annotations__)
                raise TypeError(f"there is no argument {keyword!r}; limits are {known}")
            if value is None:
                continue
            name = names.get(keyword, keyword)
            if isinstance(value, str):
                value = parse_quantity(value, units[name], bare=False)
            if (mine := given.get(name, getattr(self, name))) not in (None, value):
                raise InputError(f"{name} is {value!r} and {mine!r}; give it once")
            given[name] = value
        return replace(self, **given)

    def require_limits_of_a_step(self) -> None:
        """Check that no limit is on a whole training, where its length is unknown."""
        flags = {item.name: declared.alias for item, declared in declared_options(Constraints)}
        for row, _ in given_limits(self.limits):
            if row.exponents and row.of_job:
                raise InputError(
                    f"--{flags[row.name]} limits the whole training, and its length is unknown; "
                    "add --steps with its number of optimizer steps to tuner optimize"
                )

    def relative_to(self, baseline_time_s: float | None) -> Constraints:
        """Return these constraints with the limit on slowdown as a deadline, if it is known."""
        if self.max_slowdown is None or baseline_time_s is None:
            return self
        allowed_s = (1 + self.max_slowdown) * baseline_time_s
        return replace(
            self,
            deadline_s=min(self.deadline_s or allowed_s, allowed_s),
            baseline_time_s=baseline_time_s,
        )

    @property
    def prices(self) -> tuple[float, float]:
        """Prices of a kilowatt-hour and of a GPU hour; 0 if not given."""
        return self.price_per_kWh or 0.0, self.price_per_gpu_hour or 0.0

    @property
    def rates(self) -> dict[str, float]:
        """The prices and the grid's intensity that were given, by name."""
        return self._numbers("price_per_kWh", "price_per_gpu_hour", "grid_gCO2_per_kWh")

    @property
    def limits(self) -> dict[str, float]:
        """The limits that were given, by name."""
        return self._numbers(*(limit.name for limit in LIMITS))

    def _numbers(self, *names: str) -> dict[str, float]:
        given = self.given
        return {name: float(given[name]) for name in names if name in given}

    @property
    def goal(self) -> str:
        """The objective in effect, one of `OBJECTIVES`.

        Without one, a deadline without an energy budget means least energy, every other limit least
        time, and no limit the knee.
        """
        if self.objective is not None or not self.limits:
            return self.objective or "knee"
        deadline_alone = self.deadline_s is not None and self.budget_kJ is None
        return "energy" if deadline_alone else "time"

    @property
    def given(self) -> dict[str, Any]:
        """The constraints that were given, by name: the section of study.toml."""
        values = {item.name: getattr(self, item.name) for item, _ in declared_options(type(self))}
        return {name: value for name, value in values.items() if value is not None}

    def excess(self, job: JobFigures) -> dict[str, float]:
        """Return by which share each limit on a known figure is exceeded; 0 or less if met."""
        values = [
            (row, limit, getattr(job, row.figure)) for row, limit in given_limits(self.limits)
        ]
        return {row.name: value / limit - 1 for row, limit, value in values if value is not None}

    @property
    def is_relative(self) -> bool:
        """True if the deadline is that of the limit on slowdown."""
        share, whole_s = self.max_slowdown, self.baseline_time_s
        if share is None or whole_s is None:
            return False
        return self.deadline_s == (1 + share) * whole_s

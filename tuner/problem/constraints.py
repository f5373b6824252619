"""Limits on the training job, the objective within them, and how far a job is beyond a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

from tuner.formatting import Units, number
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import check_options, declared_options, option, parse_quantity

if TYPE_CHECKING:
    import numpy as np


class JobFigures(NamedTuple):
    """Figures of the whole training that limits are on, one of each or an array; None if no limit
    can be compared with it."""

    energy_kJ: float | np.ndarray | None = None
    time_s: float | np.ndarray | None = None
    power_W: float | np.ndarray | None = None
    peak_power_W: float | np.ndarray | None = None
    gpus: int | np.ndarray | None = None


@dataclass(frozen=True)
class Limit:
    """Limit on the training job, a row of `LIMITS`; `name` is a field of `Limits` and of
    `Constraints`, `figure` one of `JobFigures`.

    Attributes:
        phrase: returns the limit as in "within 25 kJ".
        text: returns a value with a number of digits, as the object of a sentence.
        of_training: grows with the number of steps.
    """

    name: str
    figure: str
    noun: str
    label: str
    phrase: Callable[[float, Units], str]
    text: Callable[[float, Units, int], str]
    of_training: bool = False


#: Every limit on the training job.
LIMITS = (
    Limit(
        "budget_kJ",
        "energy_kJ",
        "energy budget",
        "energy budget of the job (kJ)",
        lambda value, units: f"within {units.energy_text(value)}",
        lambda value, units, digits: units.energy_text(value, digits),
        of_training=True,
    ),
    Limit(
        "deadline_s",
        "time_s",
        "deadline",
        "deadline (s)",
        lambda value, units: f"within {units.time_text(value)}",
        lambda value, units, digits: units.time_text(value, digits),
        of_training=True,
    ),
    Limit(
        "power_cap_W",
        "power_W",
        "power cap",
        "cap on the average power (W)",
        lambda value, _: f"at no more than {number(value)} W on average",
        lambda value, _, digits: f"{number(value, digits)} W on average",
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


@dataclass(frozen=True)
class Limits:
    """Absolute limits on the training job; None for each that was not given.

    Attributes:
        slowdown: limit on the slowdown against the baseline that `deadline_s` stands for; None if
            the deadline was given as such.
    """

    budget_kJ: float | None = None
    deadline_s: float | None = None
    power_cap_W: float | None = None
    peak_power_W: float | None = None
    max_gpus: int | None = None
    slowdown: float | None = None

    @property
    def given(self) -> list[tuple[Limit, float]]:
        """The limits that were given, each with its value."""
        values = [(row, getattr(self, row.name)) for row in LIMITS]
        return [(row, value) for row, value in values if value is not None]

    def __bool__(self) -> bool:
        """Return True if there is a limit."""
        return bool(self.given)

    def ratios(self, job: JobFigures) -> dict[str, Any]:
        """Return each known figure over its limit, by the limit's name: above 1, it exceeds it."""
        values = [(row.name, limit, getattr(job, row.figure)) for row, limit in self.given]
        return {name: value / limit for name, limit, value in values if value is not None}

    def worst_ratio(self, job: JobFigures) -> np.ndarray:
        """Return the largest of `ratios`; 0 without one."""
        import numpy as np

        worst: Any = 0.0
        for ratio in self.ratios(job).values():
            worst = np.maximum(worst, ratio)
        return np.asarray(worst)

    def phrase(self, units: Units) -> str:
        """Return the limits as in "within 25 kJ and on at most 2 GPUs"."""
        return " and ".join(row.phrase(value, units) for row, value in self.given)

    def to_json(self) -> dict[str, float]:
        """Return the given limits by name."""
        return {row.name: value for row, value in self.given}


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


class LimitOptions(TypedDict, total=False):
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

    def limited(self, **limits: Unpack[LimitOptions]) -> Constraints:
        """Return these constraints with the limits that are not None."""
        declared = [(item.name, option) for item, option in declared_options(Constraints)]
        names = {option.alias.replace("-", "_"): name for name, option in declared if option.alias}
        units = {name: option.unit for name, option in declared}
        given: dict[str, Any] = {}
        for keyword, value in limits.items():
            if keyword not in LimitOptions.__annotations__:
                options = ", ".join(LimitOptions.__annotations__)
                raise TypeError(f"there is no argument {keyword!r}; limits are {options}")
            if value is None:
                continue
            name = names.get(keyword, keyword)
            if isinstance(value, str):
                value = parse_quantity(value, units[name])
            if (mine := given.get(name, getattr(self, name))) not in (None, value):
                raise InputError(f"{name} is {value!r} and {mine!r}; give it once")
            given[name] = value
        return replace(self, **given)

    def require_limits_of_a_step(self) -> None:
        """Check that no limit is on a whole training, where its length is unknown."""
        flags = {item.name: declared.alias for item, declared in declared_options(Constraints)}
        for row, _ in self.limits.given:
            if row.of_training:
                raise InputError(
                    f"--{flags[row.name]} limits the whole training, and its length is unknown; "
                    "add --steps with its number of optimizer steps to tuner optimize"
                )

    @property
    def limits(self) -> Limits:
        """The limits as absolute ones, without a limit on slowdown whose baseline is unknown."""
        deadline_s, slowdown = self.deadline_s, None
        if self.max_slowdown is not None and self.baseline_time_s is not None:
            allowed_s = (1 + self.max_slowdown) * self.baseline_time_s
            if deadline_s is None or allowed_s <= deadline_s:
                deadline_s, slowdown = allowed_s, self.max_slowdown
        return Limits(
            self.budget_kJ,
            deadline_s,
            self.power_cap_W,
            self.peak_power_W,
            self.max_gpus,
            slowdown,
        )

    @property
    def need_energy(self) -> bool:
        """False if time alone is minimized, and nothing limits energy or power."""
        limited = (self.budget_kJ, self.power_cap_W, self.peak_power_W)
        return self.objective != "time" or any(limit is not None for limit in limited)

    @property
    def prices(self) -> tuple[float, float]:
        """Prices of a kilowatt-hour and of a GPU hour; 0 if not given."""
        return self.price_per_kWh or 0.0, self.price_per_gpu_hour or 0.0

    @property
    def goal(self) -> str:
        """The objective in effect, one of `OBJECTIVES`.

        Without one, a deadline without an energy budget means least energy, every other limit least
        time, and no limit the knee.
        """
        if self.objective is not None or not self.limits:
            return self.objective or "knee"
        deadline_alone = self.limits.deadline_s is not None and self.budget_kJ is None
        return "energy" if deadline_alone else "time"

    @property
    def given(self) -> dict[str, Any]:
        """The constraints that were given, by name: the section of study.toml."""
        values = {item.name: getattr(self, item.name) for item, _ in declared_options(type(self))}
        return {name: value for name, value in values.items() if value is not None}

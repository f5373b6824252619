"""Constraints and objective of the training job: energy, time, power, GPUs, what to minimize."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.options import check_options, declared_options, option

#: Objectives that the user can choose.
OBJECTIVES = ("energy", "time", "edp", "cost", "carbon", "knee")


@dataclass(frozen=True)
class Constraints:
    """Limits on the training job, and the objective among the configurations that meet them.

    Without limits and objective the knee of the front is chosen; under a deadline alone the least
    energy; else the least time. A point with no power samples is not chosen under `peak_power_W`.
    `max_slowdown` becomes a deadline once the baseline was measured (`relative_to`).

    Attributes:
        baseline_time_s: time of the whole job with the baseline, of which `max_slowdown` is a
            share; None while it is unknown.

    Raises:
        InvalidValue: a value has another type or lies outside its limits.
        UnknownName: there is no such objective.
        InputError: a price or an intensity is missing for the objective, or is given without it.
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
        choices=OBJECTIVES,
        flag="minimize",
        former_flag="choose",
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
        if isinstance(self.objective, str):  # "least-energy" in the release before
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

    def limited(
        self,
        budget_kJ: float | None,
        deadline_s: float | None,
        power_cap_W: float | None,
        max_slowdown: float | None = None,
    ) -> Constraints:
        """Return these constraints with the limits that are not None.

        Raises:
            InputError: a limit is given here and there with different values.
        """
        limits: dict[str, Any] = {
            "budget_kJ": budget_kJ,
            "deadline_s": deadline_s,
            "power_cap_W": power_cap_W,
            "max_slowdown": max_slowdown,
        }
        given = {name: value for name, value in limits.items() if value is not None}
        for name, value in given.items():
            if (mine := getattr(self, name)) not in (None, value):
                raise InputError(
                    f"{name} is {value!r} and constraints.{name} is {mine!r}; give it once"
                )
        return replace(self, **given)

    def require_limits_of_a_step(self) -> None:
        """Check that no limit is on a whole training, where its length is unknown.

        Raises:
            InputError: one is.
        """
        for flag, value in {"--budget": self.budget_kJ, "--deadline": self.deadline_s}.items():
            if value is not None:
                raise InputError(
                    f"{flag} limits the whole training, and its length is unknown; add --steps "
                    "with its number of optimizer steps to tuner optimize"
                )

    def relative_to(self, baseline_time_s: float | None) -> Constraints:
        """Return these constraints with the limit on slowdown as a deadline.

        Args:
            baseline_time_s: time of the whole job with the baseline; None if it was not measured.
        """
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
        return self._numbers("budget_kJ", "deadline_s", "power_cap_W", "peak_power_W", "max_gpus")

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

    def excess(
        self,
        energy_kJ: float,
        time_s: float,
        power_W: float,
        *,
        peak_power_W: float | None = None,
        gpus: int | None = None,
    ) -> dict[str, float]:
        """Return by which share each limit is exceeded; 0 or less if it is met.

        A limit on a value that is None is left out.
        """
        values = {
            "budget_kJ": energy_kJ,
            "deadline_s": time_s,
            "power_cap_W": power_W,
            "peak_power_W": peak_power_W,
            "max_gpus": gpus,
        }
        found = {}
        for name, limit in self.limits.items():
            value = values[name]
            if value is not None:
                found[name] = value / limit - 1
        return found

"""Type of the validity rules, and the decorator that collects them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob

Check = Callable[[Configuration, TrainingJob, Cluster], str | None]


@dataclass(frozen=True)
class Rule:
    """Reason for which a configuration cannot run.

    Attributes:
        knobs: the knobs it reads; empty for a rule on the job and the cluster alone.
        broken: returns a phrase that names the offending numbers, or None if the rule holds.
    """

    name: str
    knobs: tuple[str, ...]
    why: str
    broken: Check


def registering(rules: list[Rule]) -> Callable[..., Callable[[Check], Check]]:
    """Return a decorator `rule(why, *knobs)` that adds a function to a list, under its own name."""

    def rule(why: str, *knobs: str) -> Callable[[Check], Check]:
        def register(check: Check) -> Check:
            rules.append(Rule(check.__name__.strip("_"), knobs, why, check))
            return check

        return register

    return rule

"""One job on several kinds of GPU, each at its best configuration under the same limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.results.choice import cost_of
from tuner.results.parts import Point
from tuner.results.result import Result
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.errors import InputError


@dataclass(frozen=True)
class Kind:
    """Plan of the job on one cluster; None if the job cannot run there, with the reason."""

    cluster: Cluster
    price_per_gpu_hour: float | None
    result: Result | None
    refused: str = ""

    @property
    def best(self) -> Point | None:
        """The choice under the limits, or the nearest to them."""
        return self.result.best if self.result is not None else None

    @property
    def met(self) -> bool:
        """True if the choice meets the limits."""
        return self.result is not None and self.result.choice.met

    @property
    def cost(self) -> float | None:
        """Price of the whole job; None if no price is known."""
        if self.best is None or self.result is None:
            return None
        rates = dict(self.result.constraints)
        if self.price_per_gpu_hour is not None:
            rates["price_per_gpu_hour"] = self.price_per_gpu_hour
        priced = rates.keys() & {"price_per_kWh", "price_per_gpu_hour"}
        return cost_of(self.best, rates) if priced else None

    @property
    def charges_host(self) -> bool:
        """True if its energies hold the nodes' hosts, False if those of the GPUs alone."""
        return bool(self.cluster.host_W or self.cluster.supply_loss)

    def to_json(self) -> dict[str, Any]:
        """Return the kind as JSON values."""
        best = self.best
        return {
            "cluster": self.cluster.name,
            "device": self.cluster.device.name,
            "price_per_gpu_hour": self.price_per_gpu_hour,
            "best": best.to_json() if best is not None else None,
            "cost": self.cost,
            "charges_host": self.charges_host,
            "met": self.met,
            "refused": self.refused,
        }


def several(text: str) -> bool:
    """Return True if a word of `--cluster` names several clusters, and is no file with a comma."""
    return "," in text and not Path(text).exists()


def priced_clusters(text: str) -> list[tuple[Cluster, float | None]]:
    """Return the clusters of "NAME,NAME=PRICE,...", each with the price of its GPU hour."""
    found: list[tuple[Cluster, float | None]] = []
    for word in text.split(","):
        name, equals, stated = word.strip().partition("=")
        try:
            price = float(stated) if equals else None
        except ValueError:
            price = math.nan
        if not name or (price is not None and not 0 < price < math.inf):
            raise InputError(
                f"--cluster takes names such as a100-8,h100-32, each with the price of a GPU hour "
                f"if known (a100-8=1.8), not {word.strip()!r}"
            )
        cluster = load_cluster(name)
        if cluster.name in [each.name for each, _ in found]:
            raise InputError(f"--cluster names {cluster.name!r} twice; give each cluster once")
        found.append((cluster, price))
    return found


def plan_kinds(
    clusters: Sequence[tuple[Cluster, float | None]],
    plan: Callable[[Cluster, float | None], Result],
) -> list[Kind]:
    """Plan for each cluster; one on which the job cannot run says why in its place."""
    found, errors = [], []
    for cluster, price in clusters:
        try:
            found.append(Kind(cluster, price, plan(cluster, price)))
        except InputError as error:
            errors.append(error)
            found.append(Kind(cluster, price, None, str(error)))
    if len(errors) == len(found):
        raise errors[0]
    return found
